"""Attention by torch's scaled_dot_product_attention, on CPU and CUDA."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import GatheringAttention


class SdpaAttention(GatheringAttention):
    """Runs torch's kernel on views, with the heads as its batch axis; it copies nothing."""

    name = "sdpa"

    @override
    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        attended = F.scaled_dot_product_attention(
            _heads_first(query), _heads_first(key), _heads_first(value), scale=scale
        )
        return attended[0].transpose(0, 1)


def _heads_first(
    x: Float[Tensor, "tokens heads head_dim"],
) -> Float[Tensor, "1 heads tokens head_dim"]:
    return x.transpose(0, 1).unsqueeze(0)


# cuDNN's kernel uses the Hopper instructions that torch's own flash kernel does not; the
# memory-efficient kernel is the only fused one for float32. The unfused fall-back would need
# gigabytes for the scores of one layer, so it is left out: no kernel is an error, not a surprise.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


class FlashAttention(SdpaAttention):
    """Runs the fastest fused kernel that takes the tensors, and never an unfused one."""

    name = "flash"

    @override
    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Raise RuntimeError if no kernel of the list takes these tensors."""
        with sdpa_kernel(_KERNELS, set_priority=True):
            return super().attend(query, key, value, scale=scale)
