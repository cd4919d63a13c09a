"""Attention by torch's scaled_dot_product_attention, on CPU and CUDA."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import AttentionBackend, Heads, Visible
from vllm_omni.diffusion.distributed.parallel_state import is_root
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)


class SdpaAttention(AttentionBackend):
    """Runs torch's kernel on views, with the heads as its batch axis; it copies nothing."""

    name = "sdpa"

    @override
    def attend(self, query: Heads, key: Visible, value: Visible, *, scale: float) -> Heads:
        attended = F.scaled_dot_product_attention(
            _heads_first(query), _heads_first(key), _heads_first(value), scale=scale
        )
        return attended[0].transpose(0, 1)


def _heads_first(x: Heads) -> Float[Tensor, "1 heads tokens head_dim"]:
    return x.transpose(0, 1).unsqueeze(0)


SOUND_CUDNN = 91501
"""The first cuDNN (9.15.1) whose kernel is right at lengths that are no multiple of 128."""


def fused_kernels(cudnn: int | None) -> tuple[SDPBackend, ...]:
    """The fused kernels that may be taken, the fastest first.

    cuDNN's kernel uses the Hopper instructions that torch's own flash kernel does not, and is left
    out where it is not sound. The memory-efficient kernel is the only fused one for float32. The
    unfused fall-back would need gigabytes for the scores of one layer, so it is left out: no kernel
    is an error, not a surprise.

    Args:
        cudnn: version of cuDNN as torch tells it; ``None`` without one.
    """
    first = (SDPBackend.CUDNN_ATTENTION,) if cudnn is not None and cudnn >= SOUND_CUDNN else ()
    return (*first, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class FlashAttention(SdpaAttention):
    """Runs the fastest sound fused kernel that takes the tensors, and never an unfused one."""

    name = "flash"

    def __init__(self) -> None:
        cudnn = torch.backends.cudnn.version()
        self._kernels = list(fused_kernels(cudnn))
        if cudnn is not None and cudnn < SOUND_CUDNN and is_root():
            logger.warning(
                "attention runs without cuDNN, on a slower kernel: cuDNN %d is below %d and not "
                "sound at the lengths of this model; install a torch whose cuDNN is newer",
                *(cudnn, SOUND_CUDNN),
            )

    @override
    def attend(self, query: Heads, key: Visible, value: Visible, *, scale: float) -> Heads:
        """Raise RuntimeError if no kernel of the list takes these tensors."""
        with sdpa_kernel(self._kernels, set_priority=True):
            return super().attend(query, key, value, scale=scale)

    @override
    def kernel(self, *operands: Float[Tensor, "_ heads head_dim"], scale: float) -> str:
        """Ask torch which kernel of the list it takes."""
        views = [_heads_first(operand) for operand in operands]
        with sdpa_kernel(self._kernels, set_priority=True):
            choice = torch.ops.aten._fused_sdp_choice(*views, scale=scale)  # noqa: SLF001
        return SDPBackend(choice).name.lower()


class Flash3Attention(FlashAttention):
    """Runs FlashAttention-3, where its package is installed, in the place of torch's own kernel.

    Raises:
        ConfigError: if torch cannot take it in.
    """

    name = "flash3"

    def __init__(self) -> None:
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(
                "attention backend flash3 needs the package flash_attn_3 for this torch "
                f"({type(error).__name__}: {error}); install it or choose flash "
                "(diffusion_attention_backend)"
            ) from error
        self._kernels = [SDPBackend.FLASH_ATTENTION]

    @override
    def kernel(self, *operands: Float[Tensor, "_ heads head_dim"], scale: float) -> str:
        """Name the version beside what torch takes."""
        return f"{super().kernel(*operands, scale=scale)} (FlashAttention-3)"
