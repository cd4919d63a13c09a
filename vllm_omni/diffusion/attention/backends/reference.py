"""Attention written out in float32: the oracle for every other backend."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vllm_omni.diffusion.attention.backend import gather_pages


class ReferenceAttention:
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

    def attend_pages(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key_pages: Float[Tensor, "pages page_tokens heads head_dim"],
        value_pages: Float[Tensor, "pages page_tokens heads head_dim"],
        *,
        block_table: Int[Tensor, " window_pages"],
        visible_tokens: int,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Gather, then attend."""
        key = gather_pages(key_pages, block_table, visible_tokens)
        value = gather_pages(value_pages, block_table, visible_tokens)
        return self.attend(query, key, value, scale=scale)
