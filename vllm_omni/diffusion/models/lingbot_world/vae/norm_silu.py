"""Norm and SiLU of the Wan VAE in one pass over memory: a Triton kernel for NVIDIA GPUs.

Only a process that compiles on a GPU imports this file; Triton comes with torch's CUDA builds.
"""

from typing import Any

import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

SMALLEST_NORM = tl.constexpr(1e-12)
BLOCK_ELEMENTS = tl.constexpr(4096)
WARPS = 8


# No integer is a constant of the compiled code, so that one compilation serves all sizes of frames.
@triton.jit(do_not_specialize=["pixels", "width", "target_width"])
def norm_silu_kernel(  # noqa: ANN201
    x,  # noqa: ANN001
    scale,  # noqa: ANN001
    target,  # noqa: ANN001
    pixels,  # noqa: ANN001
    width,  # noqa: ANN001
    target_width,  # noqa: ANN001
    CHANNELS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Compute a block of pixels; rounding to the target's dtype is where separate calls round.

    Args:
        x: pointer to ``[pixels, CHANNELS]``, contiguous.
        scale: pointer to ``[CHANNELS]``, float32.
        target: pointer to the first pixel written.
        pixels: number of all pixels.
        width: pixels of a row of ``x``.
        target_width: pixels from one row of the target to the next.
        COLUMNS: the channels, filled up to a power of two.
    """
    ROWS: tl.constexpr = BLOCK_ELEMENTS // COLUMNS  # noqa: N806
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, COLUMNS)
    inside = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    value = tl.load(x + pixel[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(value * value, axis=1))
    inverse = tl.div_rn(1.0, tl.maximum(norm, SMALLEST_NORM))
    factor = tl.load(scale + channel, mask=channel < CHANNELS, other=0.0)
    stored = target.dtype.element_ty
    normed = (value * inverse[:, None] * factor[None, :]).to(stored).to(tl.float32)
    active = tl.div_rn(normed, 1.0 + tl.exp(-normed)).to(stored)
    place = (pixel // width) * target_width + pixel % width
    tl.store(target + place[:, None] * CHANNELS + channel[None, :], active, mask=inside)


def norm_silu(
    x: Float[Tensor, "time height width channels"],
    scale: Float32[Tensor, " channels"],
    target: Float[Tensor, "time height width channels"],
) -> None:
    """Write ``silu(x / max(|x|, 1e-12) * scale)`` into ``target``.

    The sum over a pixel's channels does not depend on the number or place of other pixels, so that
    a share of a frame's columns has the bits of the whole frame.

    Args:
        x: contiguous, of at most 4096 channels.
        target: rows may lie apart, as those of a frame with borders do.
    """
    channels = x.shape[3]
    columns = triton.next_power_of_2(channels)
    pixels = x.numel() // channels
    kernel: Any = norm_silu_kernel
    kernel[(triton.cdiv(pixels * columns, BLOCK_ELEMENTS.value),)](
        x, scale, target, pixels, x.shape[2], target.stride(1) // channels,
        CHANNELS=channels, COLUMNS=columns, num_warps=WARPS,
    )  # fmt: skip
