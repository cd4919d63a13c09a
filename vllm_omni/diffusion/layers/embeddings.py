"""Latents cut into patches and put together again, and the sinusoid of a timestep."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vllm_omni.diffusion.geometry import PATCH


def patchify(
    x: Float[Tensor, "channels frames height width"],
) -> Float[Tensor, "frames tokens features"]:
    """Cut each frame into 2x2 patches; features are ordered (channel, row, column)."""
    channels, frames, height, width = x.shape
    patches = x.reshape(channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(
        frames, (height // PATCH) * (width // PATCH), channels * PATCH * PATCH
    )


def unpatchify(
    tokens: Float[Tensor, "frames tokens features"], rows: int, columns: int
) -> Float[Tensor, "channels frames height width"]:
    """Put 2x2 patches together; features are ordered (row, column, channel), not as above."""
    frames = tokens.shape[0]
    channels = tokens.shape[2] // (PATCH * PATCH)
    patches = tokens.reshape(frames, rows, columns, PATCH, PATCH, channels)
    return patches.permute(5, 0, 1, 3, 2, 4).reshape(
        channels, frames, rows * PATCH, columns * PATCH
    )


def timestep_sinusoid(timesteps: Float[Tensor, " rows"], dim: int) -> Float[Tensor, "rows dim"]:
    """Compute ``[cos | sin]`` of ``t * 10000^(-j / (dim / 2))`` in float64."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=timesteps.device)
    angles = torch.outer(timesteps.double(), torch.pow(10000.0, -steps / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class PatchEmbedding(nn.Module):
    """A (1, 2, 2) convolution with stride 2, computed as a matrix product over patches."""

    def __init__(self, in_channels: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, in_channels, 1, PATCH, PATCH, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, dtype=dtype))

    def forward(
        self, patches: Float[Tensor, "frames tokens features"]
    ) -> Float[Tensor, "frames tokens dim"]:
        """Project patches that :func:`patchify` has cut."""
        return F.linear(patches, self.weight.flatten(1), self.bias)
