"""Attention written out in float32: the oracle for every other backend."""

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.attention.backend import GatheringAttention


class ReferenceAttention(GatheringAttention):
    """Scores, softmax and sum in float32; probabilities are rounded to the value's dtype."""

    name = "reference"

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Materialise all scores; slow and plain."""
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
        weights = scores.softmax(dim=-1).to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value)
