"""Attention by torch's scaled_dot_product_attention, on CPU and CUDA."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.attention.backend import GatheringAttention


class SdpaAttention(GatheringAttention):
    """Views in, fused kernel, view out; nothing is copied for an extent."""

    name = "sdpa"

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend with heads as the batch axis of the kernel."""
        attended = F.scaled_dot_product_attention(
            _heads_first(query), _heads_first(key), _heads_first(value), scale=scale
        )
        return attended[0].transpose(0, 1)


def _heads_first(
    x: Float[Tensor, "tokens heads head_dim"],
) -> Float[Tensor, "1 heads tokens head_dim"]:
    return x.transpose(0, 1).unsqueeze(0)
