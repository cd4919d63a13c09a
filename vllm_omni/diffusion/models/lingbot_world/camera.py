"""Camera poses turned into the per-pixel ray tensor that steers the transformer.

Each latent frame is described by its camera's motion since the frame before: per pixel the origin
(the scaled translation) and the viewing direction, six channels, folded 8x8 into 384.
"""

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional as F

from vllm_omni.diffusion.geometry import SPATIAL_FACTOR

REFERENCE_WIDTH = 832
REFERENCE_HEIGHT = 480
"""Intrinsics are given for pictures of this size."""
FOCAL_PIXELS = 500.0
"""Focal length of keys and live cameras, at the size of the rollout."""


def reference_intrinsics(*, width: int, height: int) -> Float32[np.ndarray, "4"]:
    """Intrinsics (at reference size) that give ``FOCAL_PIXELS`` and a centred principal point."""
    return np.array(
        [
            FOCAL_PIXELS * REFERENCE_WIDTH / width,
            FOCAL_PIXELS * REFERENCE_HEIGHT / height,
            REFERENCE_WIDTH / 2,
            REFERENCE_HEIGHT / 2,
        ],
        dtype=np.float32,
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the camera arithmetic for a target dtype: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inverse_rigid(poses: Float[Tensor, "*n 4 4"]) -> Float[Tensor, "*n 4 4"]:
    rotation = poses[..., :3, :3].transpose(-1, -2)
    inverse = torch.zeros_like(poses)
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3:] = -(rotation @ poses[..., :3, 3:])
    inverse[..., 3, 3] = 1.0
    return inverse


def relative_poses(poses: Float[Tensor, "frames 4 4"]) -> Float[Tensor, "frames 4 4"]:
    """Poses as seen from the first one, which becomes exactly the identity."""
    relative = _inverse_rigid(poses[:1]) @ poses
    relative[0] = torch.eye(4, dtype=poses.dtype, device=poses.device)
    return relative


def framewise_deltas(
    poses: Float[Tensor, "frames 4 4"], translation_scale: float | None = None
) -> Float[Tensor, "frames 4 4"]:
    """Motion of each frame since the frame before; the identity for the first.

    Args:
        poses: camera-to-world.
        translation_scale: divisor of all translations, ``None`` for the longest step of these
            frames. Where nothing moves, nothing is divided.
    """
    relative = relative_poses(poses)
    deltas = relative.clone()
    deltas[1:] = _inverse_rigid(relative[:-1]) @ relative[1:]
    if translation_scale is None:
        scale = deltas[:, :3, 3].norm(dim=-1).max()
        if scale > 0:
            deltas[:, :3, 3] = deltas[:, :3, 3] / scale
    elif translation_scale > 0:
        deltas[:, :3, 3] = deltas[:, :3, 3] / translation_scale
    return deltas


def build_rays(
    deltas: Float[Tensor, "frames 4 4"],
    intrinsics: Float[Tensor, "frames 4"],
    *,
    height: int,
    width: int,
    target_height: int | None = None,
    target_width: int | None = None,
) -> Float[Tensor, "frames 6 target_height target_width"]:
    """Origin and direction of the ray through each pixel centre.

    Args:
        deltas: motion of each frame, translations already scaled.
        intrinsics: fx, fy, cx, cy at 832x480 reference pixels.
        height: size that the intrinsics are rescaled to; with ``width``.
        target_height: rows of the result, ``None`` for ``height``; with ``target_width``.
    """
    rows, columns = target_height or height, target_width or width
    as_ = {"dtype": deltas.dtype, "device": deltas.device}
    fx, cx = (intrinsics[:, i, None, None] * (width / REFERENCE_WIDTH) for i in (0, 2))
    fy, cy = (intrinsics[:, i, None, None] * (height / REFERENCE_HEIGHT) for i in (1, 3))
    x = ((torch.arange(columns, **as_) + 0.5) * (width / columns))[None, None, :]
    y = ((torch.arange(rows, **as_) + 0.5) * (height / rows))[None, :, None]
    shape = (len(deltas), rows, columns)
    local = torch.stack(
        [((x - cx) / fx).expand(shape), ((y - cy) / fy).expand(shape), torch.ones(shape, **as_)],
        dim=-1,
    )
    local = local / local.norm(dim=-1, keepdim=True)
    direction = torch.einsum("fij,fhwj->fhwi", deltas[:, :3, :3], local)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    origin = deltas[:, None, None, :3, 3].expand_as(direction)
    return torch.cat([origin, direction], dim=-1).permute(0, 3, 1, 2)


def build_plucker_embedding(
    poses: Float[Tensor, "frames 4 4"],
    intrinsics: Float[Tensor, "frames 4"],
    *,
    height: int,
    width: int,
    target_height: int | None = None,
    target_width: int | None = None,
    translation_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "frames 6 target_height target_width"]:
    """Rays of a path in one go: deltas, scale, rays, and the cast to ``dtype`` last.

    The arguments are those of :func:`framewise_deltas` and :func:`build_rays`.
    """
    wide = compute_dtype(dtype)
    rays = build_rays(
        framewise_deltas(poses.to(wide), translation_scale),
        intrinsics.to(wide),
        height=height,
        width=width,
        target_height=target_height,
        target_width=target_width,
    )
    return rays.to(dtype)


def fold_camera(
    rays: Float[Tensor, "frames 6 height width"],
) -> Float[Tensor, "384 frames latent_height latent_width"]:
    """Move each 8x8 block of pixels into channels (channel = c * 64 + dy * 8 + dx)."""
    return F.pixel_unshuffle(rays, SPATIAL_FACTOR).transpose(0, 1).contiguous()
