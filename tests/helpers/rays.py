"""The rays of a whole path in one go, out of the same steps that a session takes by chunks."""

import torch

from vllm_omni.diffusion.models.lingbot_world.camera import (
    build_rays,
    compute_dtype,
    framewise_deltas,
)


def path_rays(
    poses: torch.Tensor,
    intrinsics: torch.Tensor,
    *,
    height: int,
    width: int,
    translation_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    wide = compute_dtype(dtype)
    deltas = framewise_deltas(poses.to(wide), translation_scale)
    return build_rays(deltas, intrinsics.to(wide), height=height, width=width).to(dtype)
