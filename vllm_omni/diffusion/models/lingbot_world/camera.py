"""Camera paths turned into the per-pixel ray tensor that steers the transformer.

Each latent frame is described by its camera's motion since the frame before: per pixel the origin
(the scaled translation) and the viewing direction, six channels, folded 8x8 into 384.

A *track* is a session's camera source with everything precomputed; a *state* is where the track
stands. ``next_chunk`` leaves the given state alone and returns the next one.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.messages import (
    CameraSource,
    ChunkPlan,
    LiveCamera,
    RecordedCamera,
    ScriptedKeys,
)
from vllm_omni.diffusion.models.lingbot_world.actions import (
    MOVE_STEP,
    REFERENCE_HEIGHT,
    REFERENCE_WIDTH,
    integrate_camera_actions,
    reference_intrinsics,
)
from vllm_omni.diffusion.models.lingbot_world.resample import interpolate_camera_trajectory
from vllm_omni.errors import InvalidRequestError

__all__ = [
    "CAMERA_CHANNELS", "CameraState", "CameraTrack", "LiveTrack", "RayView", "RecordedTrack",
    "ScriptedTrack", "build_plucker_embedding", "build_rays", "compute_dtype", "fold_camera",
    "framewise_deltas", "interpolate_camera_trajectory", "open_camera_track", "relative_poses",
]  # fmt: skip

CAMERA_CHANNELS = 6 * SPATIAL_FACTOR * SPATIAL_FACTOR


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


@dataclass(frozen=True, slots=True, eq=False)
class CameraState:
    """Where a session's camera stands between two chunks.

    Attributes:
        next_chunk_index: the chunk that comes next.
        pose: camera-to-world pose of the last latent frame, the anchor of the next chunk.
        pitch_rad: pitch that keys have accumulated.
    """

    next_chunk_index: int
    pose: Float64[np.ndarray, "4 4"]
    pitch_rad: float


def _start() -> CameraState:
    return CameraState(next_chunk_index=0, pose=np.eye(4), pitch_rad=0.0)


def _check_order(state: CameraState, plan: ChunkPlan) -> None:
    if plan.chunk_index != state.next_chunk_index:
        raise InvalidRequestError(
            f"the camera stands before chunk {state.next_chunk_index}, got chunk "
            f"{plan.chunk_index}",
            field="chunk_index",
        )


@dataclass(frozen=True, slots=True)
class RayView:
    """Size, dtype and device of the ray tensors of one session."""

    geometry: VideoGeometry
    dtype: torch.dtype
    device: torch.device

    def fold(
        self, deltas: Float[Tensor, "frames 4 4"], intrinsics: Float[Tensor, "frames 4"]
    ) -> Float[Tensor, "384 frames latent_height latent_width"]:
        """Folded rays of a few frames, built on the device and cast last."""
        rays = build_rays(
            deltas.to(self.device),
            intrinsics.to(self.device),
            height=self.geometry.height,
            width=self.geometry.width,
        )
        return fold_camera(rays.to(self.dtype))

    def fold_after_anchor(
        self,
        anchor: Float64[np.ndarray, "4 4"],
        poses: Float64[np.ndarray, "3 4 4"],
        translation_scale: float | None,
    ) -> Float[Tensor, "384 3 latent_height latent_width"]:
        """Folded rays of a chunk that continues from ``anchor``, whose own row is dropped."""
        path = torch.from_numpy(np.concatenate([anchor[None], poses])).to(compute_dtype(self.dtype))
        deltas = framewise_deltas(path, translation_scale)[1:]
        row = reference_intrinsics(width=self.geometry.width, height=self.geometry.height)
        intrinsics = torch.from_numpy(row).to(path.dtype).expand(len(deltas), 4)
        return self.fold(deltas, intrinsics)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrack:
    """A recorded path: deltas and scale belong to the whole clip and are fixed at the start."""

    deltas: Float[Tensor, "latent_frames 4 4"]
    intrinsics: Float[Tensor, "latent_frames 4"]
    view: RayView

    @classmethod
    def open(cls, source: RecordedCamera, *, num_chunks: int, view: RayView) -> "RecordedTrack":
        """Resample the clip to the rollout's latent frames and take its deltas."""
        poses, intrinsics = interpolate_camera_trajectory(
            source.poses, source.intrinsics, num_chunks * LATENT_FRAMES_PER_CHUNK
        )
        wide = compute_dtype(view.dtype)
        # Copies: arrays that came through a pipe may be read-only, which torch cannot wrap.
        deltas = framewise_deltas(torch.tensor(poses, dtype=wide))
        return cls(deltas, torch.tensor(intrinsics, dtype=wide), view)

    def start(self) -> CameraState:
        """State before chunk 0."""
        return _start()

    def next_chunk(
        self, state: CameraState, plan: ChunkPlan
    ) -> tuple[Float[Tensor, "384 3 latent_height latent_width"], CameraState]:
        """Rays of the clip's next three latent frames."""
        _check_order(state, plan)
        first = state.next_chunk_index * LATENT_FRAMES_PER_CHUNK
        rows = slice(first, first + LATENT_FRAMES_PER_CHUNK)
        if first >= len(self.deltas):
            raise InvalidRequestError(
                f"the recorded path has {len(self.deltas) // LATENT_FRAMES_PER_CHUNK} chunks, got "
                f"chunk {state.next_chunk_index}"
            )
        camera = self.view.fold(self.deltas[rows], self.intrinsics[rows])
        return camera, CameraState(state.next_chunk_index + 1, state.pose, state.pitch_rad)


@dataclass(frozen=True, slots=True)
class ScriptedTrack:
    """Scripted keys: integrated from the last pose, scaled to the longest step of each chunk."""

    source: ScriptedKeys
    view: RayView

    def start(self) -> CameraState:
        """State before chunk 0: identity pose, level pitch."""
        return _start()

    def next_chunk(
        self, state: CameraState, plan: ChunkPlan
    ) -> tuple[Float[Tensor, "384 3 latent_height latent_width"], CameraState]:
        """Rays of the next three key sets."""
        _check_order(state, plan)
        if state.next_chunk_index >= len(self.source.chunks):
            raise InvalidRequestError(
                f"the camera script has {len(self.source.chunks)} chunks, got chunk "
                f"{state.next_chunk_index}"
            )
        frames = self.source.chunks[state.next_chunk_index]
        poses, pitch_rad = integrate_camera_actions(frames, state.pose, state.pitch_rad)
        camera = self.view.fold_after_anchor(state.pose, poses, translation_scale=None)
        return camera, CameraState(state.next_chunk_index + 1, poses[-1], pitch_rad)


@dataclass(frozen=True, slots=True)
class LiveTrack:
    """Poses that arrive with each plan, in controller units (one key step is full speed)."""

    view: RayView

    def start(self) -> CameraState:
        """State before chunk 0: identity pose."""
        return _start()

    def next_chunk(
        self, state: CameraState, plan: ChunkPlan
    ) -> tuple[Float[Tensor, "384 3 latent_height latent_width"], CameraState]:
        """Rays of the plan's three poses."""
        _check_order(state, plan)
        if plan.poses is None:
            raise InvalidRequestError(
                f"chunk {plan.chunk_index} of a live camera needs three poses, got none",
                field="poses",
            )
        camera = self.view.fold_after_anchor(state.pose, plan.poses, translation_scale=MOVE_STEP)
        return camera, CameraState(state.next_chunk_index + 1, plan.poses[-1], state.pitch_rad)


CameraTrack = RecordedTrack | ScriptedTrack | LiveTrack
"""``start()`` gives the state before chunk 0; ``next_chunk(state, plan)`` gives the camera tensor
of the chunk after ``state`` and the state after it, or raises InvalidRequestError where the plan
does not fit the source or the source has ended."""


def open_camera_track(
    source: CameraSource, *, num_chunks: int | None, view: RayView
) -> CameraTrack:
    """Prepare a camera source for a rollout of ``num_chunks`` chunks (``None``: endless).

    Raises:
        InvalidRequestError: if a recorded path is asked to go on for ever.
    """
    match source:
        case RecordedCamera():
            if num_chunks is None:
                raise InvalidRequestError(
                    "a recorded path needs num_frames: its scale depends on the whole clip",
                    field="extra_args.action_path",
                )
            return RecordedTrack.open(source, num_chunks=num_chunks, view=view)
        case ScriptedKeys():
            return ScriptedTrack(source, view)
        case LiveCamera():
            return LiveTrack(view)
