"""Attention by torch's fused kernels on NVIDIA GPUs, in the order that suits long windows."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_omni.diffusion.attention.backends.sdpa import SdpaAttention

# cuDNN's kernel uses the Hopper instructions that torch's own flash kernel does not; the
# memory-efficient kernel is the only fused one for float32. The unfused fall-back would need
# gigabytes for the scores of one layer, so it is left out: no kernel is an error, not a surprise.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


class FlashAttention(SdpaAttention):
    """:class:`SdpaAttention` restricted to fused kernels, fastest first."""

    name = "flash"

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend with the first kernel of the list that takes these tensors.

        Raises:
            RuntimeError: if none does.
        """
        with sdpa_kernel(_KERNELS, set_priority=True):
            return super().attend(query, key, value, scale=scale)
