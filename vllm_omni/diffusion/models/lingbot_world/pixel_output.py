"""Decoded video as pixel arrays, in the exact order of roundings that the pixels are defined by."""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

_LARGEST_BYTE = 255.0
CACHE_PIECE_ELEMENTS = 1 << 18
"""Elements that a processor converts at a time: in float32 they stay in its cache."""


def to_uint8(
    video: Float[Tensor, "3 pixel_frames height width"],
    *,
    piece_elements: int = CACHE_PIECE_ELEMENTS,
) -> UInt8[Tensor, "pixel_frames height width 3"]:
    """Round to bytes: ``round_half_even(clamp(v / 2 + 0.5, 0, 1).float() * 255)``.

    Halving, addition and clamp happen in the video's own dtype, the rest in float32. A video
    whose memory is laid out like the result, as the decoder's is, costs no transposition.

    Args:
        piece_elements: elements per launch of each operation; a device with its own memory
            wants the whole video at once.
    """
    pixels = video.permute(1, 2, 3, 0)
    flat = pixels.reshape(-1)
    output = torch.empty_like(flat, dtype=torch.uint8)
    pieces = zip(flat.split(piece_elements), output.split(piece_elements), strict=True)
    for piece, target in pieces:
        unit = piece.div(2).add_(0.5).clamp_(0.0, 1.0)
        target.copy_(unit.float().mul_(_LARGEST_BYTE).round_())
    return output.view(pixels.shape)


def to_float(
    video: Float[Tensor, "3 pixel_frames height width"],
) -> Float32[Tensor, "pixel_frames height width 3"]:
    """Map to [0, 1] in float32: ``clamp(v * 0.5 + 0.5, 0, 1)``."""
    pixels = video.permute(1, 2, 3, 0).float()
    return pixels.mul(0.5).add_(0.5).clamp_(0.0, 1.0).contiguous()
