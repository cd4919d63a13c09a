"""Arithmetic without weights of the world's twin: patches, positions, timesteps and rays."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.camera import (
    build_rays,
    fold_camera,
    reference_intrinsics,
)

RAY_KINDS = ("recorded path", "keys or live camera")
_RECORDED_INTRINSICS = (500.0, 500.0, 416.0, 240.0)


def patchify(x: Float[Tensor, "*lead c f h w"]) -> Float[Tensor, "*lead tokens features"]:
    """Tokens by frame, row, column; features by channel, row, column of a 2x2 patch."""
    *lead, channels, frames, height, width = x.shape
    x = x.reshape(-1, channels, frames, height // 2, 2, width // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return x.reshape(*lead, frames * height * width // 4, channels * 4)


def rope(starts: Int64[Tensor, "*n"], grid: tuple[int, int], head_dim: int) -> Tensor:
    """Unit complex numbers ``[*n, tokens, 1, head_dim / 2]`` of chunks from these latent frames."""
    spatial = 2 * (head_dim // 6)
    axes = (head_dim - 2 * spatial, spatial, spatial)
    temporal, rows, columns = (
        10000.0 ** -(torch.arange(0, axis, 2, dtype=torch.float64, device=starts.device) / axis)
        for axis in axes
    )
    place = starts.device
    frame = (starts[..., None] + torch.arange(LATENT_FRAMES_PER_CHUNK, device=place)).double()[
        ..., None, None, None
    ] * temporal
    row = torch.arange(grid[0], device=place).double()[:, None, None] * rows
    column = torch.arange(grid[1], device=place).double()[:, None] * columns
    shape = (*starts.shape, LATENT_FRAMES_PER_CHUNK, *grid, -1)
    angles = torch.cat([part.expand(shape) for part in (frame, row, column)], -1)
    angles = angles.flatten(-4, -2)[..., None, :]
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn neighbouring features, as pairs, by the unit complex numbers of :func:`rope`."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(-2)


def sinusoid(t: Float[Tensor, "*n"], dim: int) -> Float[Tensor, "*n dim"]:
    """Cosines and sines of timesteps at ``dim / 2`` rates from 1 down to 1/10000."""
    index = torch.arange(dim // 2, dtype=torch.float64, device=t.device)
    rates = 10000.0 ** -(index / (dim // 2))
    angles = t.double()[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def ray_basis(height: int, width: int) -> Float[Tensor, "kinds patches 12 1536"]:
    """Folded rays that each of a delta's twelve numbers contributes, for both kinds of camera."""
    kinds = []
    for row in (_RECORDED_INTRINSICS, reference_intrinsics(width=width, height=height).tolist()):
        still = build_rays(torch.eye(4)[None], torch.tensor([row]), height=height, width=width)
        basis = torch.zeros(12, 6, height, width)
        for i in range(3):
            basis[3 * i : 3 * i + 3, 3 + i] = still[0, 3:]
            basis[9 + i, i] = 1
        folded = patchify(fold_camera(basis).transpose(0, 1)[:, :, None])
        kinds.append(folded.transpose(0, 1))
    return torch.stack(kinds)
