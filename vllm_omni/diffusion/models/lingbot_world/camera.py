"""Turns the camera of a session, chunk by chunk, into the ray tensor that steers the transformer.

Each latent frame is described by the motion of its camera since the frame before. Every pixel gets
an origin (the scaled translation) and a viewing direction, six channels; blocks of 8x8 pixels are
folded into 384 channels. A *track* is a camera source with everything precomputed, a *state* is how
far a session has come on it; ``next_chunk`` takes one state and returns the next.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from vllm_omni.diffusion.camera_motion import (
    MOVE_STEP,
    float32_keeps_motion,
    integrate_keys,
    matrix_of,
    moved_to_first,
    quaternion_of,
    slerp,
)
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    LiveCamera,
    RecordedCamera,
    ScriptedKeys,
    SessionRequest,
)
from vllm_omni.errors import InternalError
from vllm_omni.platforms.base import to_device

REFERENCE_WIDTH = 832
REFERENCE_HEIGHT = 480
"""Intrinsics are given for pictures of this size."""
FOCAL_PIXELS = 500.0
"""Focal length of keys and live cameras, at the size of the rollout."""


def reference_intrinsics(*, width: int, height: int) -> Float32[np.ndarray, "4"]:
    """Compute fx, fy, cx, cy at reference size for ``FOCAL_PIXELS`` and a centred camera."""
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
    """Choose the dtype of the camera arithmetic: float64 for a float64 target, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inverse_rigid(poses: Float[Tensor, "*n 4 4"]) -> Float[Tensor, "*n 4 4"]:
    rotation = poses[..., :3, :3].transpose(-1, -2)
    inverse = torch.zeros_like(poses)
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3:] = -(rotation @ poses[..., :3, 3:])
    inverse[..., 3, 3] = 1.0
    return inverse


def relative_poses(poses: Float[Tensor, "frames 4 4"]) -> Float[Tensor, "frames 4 4"]:
    """Express poses in the frame of the first one, which becomes exactly the identity."""
    relative = _inverse_rigid(poses[:1]) @ poses
    relative[0] = torch.eye(4, dtype=poses.dtype, device=poses.device)
    return relative


def framewise_deltas(
    poses: Float[Tensor, "frames 4 4"], translation_scale: float | None = None
) -> Float[Tensor, "frames 4 4"]:
    """Compute the motion of each frame since the frame before, the identity for the first.

    Args:
        poses: camera-to-world matrices.
        translation_scale: divisor of all translations; ``None`` for the longest step of these
            frames. Nothing is divided by a step of zero.
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


def path_motion(
    poses: Float[np.ndarray, "frames 4 4"], translation_scale: float | None, dtype: torch.dtype
) -> Float[Tensor, "frames 4 4"]:
    """Compute :func:`framewise_deltas` of a path that may lie anywhere.

    Only motion steers the model, and float32 loses it far from the origin. Such paths, among them
    cameras that stand still elsewhere, are moved to their first camera and computed in float64.
    """
    # Copies: arrays that came through a pipe may be read-only, which torch cannot wrap.
    if float32_keeps_motion(poses, translation_scale):
        return framewise_deltas(torch.tensor(poses, dtype=dtype), translation_scale)
    moved = torch.from_numpy(moved_to_first(poses))
    return framewise_deltas(moved, translation_scale).to(dtype)


def build_rays(
    deltas: Float[Tensor, "frames 4 4"],
    intrinsics: Float[Tensor, "frames 4"],
    *,
    height: int,
    width: int,
) -> Float[Tensor, "frames 6 height width"]:
    """Compute origin and direction of the ray through the centre of each pixel.

    Args:
        deltas: motion of each frame, with scaled translations.
        intrinsics: fx, fy, cx, cy at 832x480 reference pixels.
        height: rows of the picture, in pixels.
        width: columns of the picture, in pixels.
    """
    as_ = {"dtype": deltas.dtype, "device": deltas.device}
    fx, cx = (intrinsics[:, i, None, None] * (width / REFERENCE_WIDTH) for i in (0, 2))
    fy, cy = (intrinsics[:, i, None, None] * (height / REFERENCE_HEIGHT) for i in (1, 3))
    x = (torch.arange(width, **as_) + 0.5)[None, None, :]
    y = (torch.arange(height, **as_) + 0.5)[None, :, None]
    shape = (len(deltas), height, width)
    local = torch.stack(
        [((x - cx) / fx).expand(shape), ((y - cy) / fy).expand(shape), torch.ones(shape, **as_)],
        dim=-1,
    )
    local = local / local.norm(dim=-1, keepdim=True)
    direction = torch.einsum("fij,fhwj->fhwi", deltas[:, :3, :3], local)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    origin = deltas[:, None, None, :3, 3].expand_as(direction)
    return torch.cat([origin, direction], dim=-1).permute(0, 3, 1, 2)


def fold_camera(
    rays: Float[Tensor, "frames 6 height width"],
) -> Float[Tensor, "384 frames latent_height latent_width"]:
    """Fold each block of 8x8 pixels into channels: channel = c * 64 + dy * 8 + dx."""
    return F.pixel_unshuffle(rays, SPATIAL_FACTOR).transpose(0, 1).contiguous()


def interpolate_camera_trajectory(
    poses: Float[np.ndarray, "source_frames 4 4"],
    intrinsics: Float[np.ndarray, "source_frames 4"],
    num_frames: int,
) -> tuple[Float[np.ndarray, "frames 4 4"], Float[np.ndarray, "frames 4"]]:
    """Spread ``num_frames`` frames evenly over a path, both ends included.

    Translations and intrinsics are interpolated linearly and rotations spherically, in float64; the
    results have the dtypes of the inputs. A path that has this number of frames is returned as it
    is, and a single frame is repeated.
    """
    source_frames = len(poses)
    if source_frames == num_frames:
        return poses, intrinsics
    if source_frames == 1:
        return np.repeat(poses, num_frames, axis=0), np.repeat(intrinsics, num_frames, axis=0)
    source_times = np.linspace(0.0, 1.0, source_frames)
    times = np.linspace(0.0, 1.0, num_frames)
    resampled = np.tile(np.eye(4), (num_frames, 1, 1))
    resampled[:, :3, 3] = _linear(times, source_times, poses[:, :3, 3])
    resampled[:, :3, :3] = _spherical(times, poses[:, :3, :3])
    new_intrinsics = _linear(times, source_times, intrinsics)
    return resampled.astype(poses.dtype), new_intrinsics.astype(intrinsics.dtype)


def _linear(
    times: Float[np.ndarray, "frames"],
    source_times: Float[np.ndarray, "source_frames"],
    values: Float[np.ndarray, "source_frames columns"],
) -> Float[np.ndarray, "frames columns"]:
    wide = values.astype(np.float64)
    return np.stack([np.interp(times, source_times, column) for column in wide.T], axis=1)


def _spherical(
    times: Float[np.ndarray, "frames"], rotations: Float[np.ndarray, "source_frames 3 3"]
) -> Float[np.ndarray, "frames 3 3"]:
    quaternions = [quaternion_of(rotation) for rotation in rotations]
    last = len(rotations) - 1
    matrices = []
    for position in times * last:
        left = min(max(int(np.floor(position)), 0), last - 1)
        matrices.append(
            matrix_of(slerp(quaternions[left], quaternions[left + 1], float(position - left)))
        )
    return np.stack(matrices)


@dataclass(frozen=True, slots=True, eq=False)
class CameraState:
    """The camera of a session between two chunks.

    Attributes:
        next_chunk_index: index of the chunk that comes next.
        pose: camera-to-world matrix of the last latent frame, the anchor of the next chunk.
        pitch_rad: pitch in radians that keys have added up to.
    """

    next_chunk_index: int
    pose: Float64[np.ndarray, "4 4"]
    pitch_rad: float


Shot = tuple[Float[Tensor, "384 3 latent_height latent_width"], Float64[np.ndarray, "4 4"], float]
"""The camera tensor of one chunk, and pose and pitch of its last latent frame."""


class CameraTrack:
    """The camera source of one session."""

    def fresh(self) -> CameraState:
        """Return the state before chunk 0, at the origin and level."""
        return CameraState(next_chunk_index=0, pose=np.eye(4), pitch_rad=0.0)

    def next_chunk(
        self, state: CameraState, plan: ChunkPlan
    ) -> tuple[Float[Tensor, "384 3 latent_height latent_width"], CameraState]:
        """Return the camera tensor of the chunk after ``state``, and the state after it.

        Raises:
            InternalError: if the plan does not fit the source, or the source has ended.
        """
        if plan.chunk_index != state.next_chunk_index:
            raise InternalError(
                f"the camera stands before chunk {state.next_chunk_index}, got chunk "
                f"{plan.chunk_index}"
            )
        camera, pose, pitch_rad = self._shot(state, plan)
        return camera, CameraState(plan.chunk_index + 1, pose, pitch_rad)

    def _shot(self, state: CameraState, plan: ChunkPlan) -> Shot:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RayView:
    """Builds the ray tensors of one session, of one size, dtype and device."""

    geometry: VideoGeometry
    dtype: torch.dtype
    device: torch.device

    def fold(
        self, deltas: Float[Tensor, "frames 4 4"], intrinsics: Float[Tensor, "frames 4"]
    ) -> Float[Tensor, "384 frames latent_height latent_width"]:
        """Build the folded rays of a few frames on the device; the cast to ``dtype`` comes last."""
        rays = build_rays(
            to_device(deltas, self.device),
            to_device(intrinsics, self.device),
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
        """Build the folded rays of the three frames that follow ``anchor``."""
        path = np.concatenate([anchor[None], poses])
        deltas = path_motion(path, translation_scale, compute_dtype(self.dtype))[1:]
        row = reference_intrinsics(width=self.geometry.width, height=self.geometry.height)
        intrinsics = torch.from_numpy(row).to(deltas.dtype).expand(len(deltas), 4)
        return self.fold(deltas, intrinsics)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrack(CameraTrack):
    """A recorded path, whose motion is scaled by the longest step of the whole clip."""

    deltas: Float[Tensor, "latent_frames 4 4"]
    intrinsics: Float[Tensor, "latent_frames 4"]
    view: RayView

    @classmethod
    def of(cls, source: RecordedCamera, *, num_chunks: int, view: RayView) -> "RecordedTrack":
        """Resample a clip to the latent frames of a rollout and compute its motion."""
        poses, intrinsics = interpolate_camera_trajectory(
            source.poses, source.intrinsics, num_chunks * LATENT_FRAMES_PER_CHUNK
        )
        wide = compute_dtype(view.dtype)
        deltas = path_motion(poses, None, wide)
        return cls(deltas, torch.tensor(intrinsics, dtype=wide), view)

    @override
    def _shot(self, state: CameraState, plan: ChunkPlan) -> Shot:
        first = state.next_chunk_index * LATENT_FRAMES_PER_CHUNK
        rows = slice(first, first + LATENT_FRAMES_PER_CHUNK)
        if first >= len(self.deltas):
            raise InternalError(
                f"the recorded path has {len(self.deltas) // LATENT_FRAMES_PER_CHUNK} chunks, got "
                f"chunk {state.next_chunk_index}"
            )
        camera = self.view.fold(self.deltas[rows], self.intrinsics[rows])
        return camera, state.pose, state.pitch_rad


@dataclass(frozen=True, slots=True)
class ScriptedTrack(CameraTrack):
    """Scripted keys, whose motion is scaled by the longest step of each chunk."""

    source: ScriptedKeys
    view: RayView

    @override
    def _shot(self, state: CameraState, plan: ChunkPlan) -> Shot:
        if state.next_chunk_index >= len(self.source.chunks):
            raise InternalError(
                f"the camera script has {len(self.source.chunks)} chunks, got chunk "
                f"{state.next_chunk_index}"
            )
        frames = self.source.chunks[state.next_chunk_index]
        poses, pitch_rad = integrate_keys(frames, state.pose, state.pitch_rad)
        camera = self.view.fold_after_anchor(state.pose, poses, translation_scale=None)
        return camera, poses[-1], pitch_rad


@dataclass(frozen=True, slots=True)
class LiveTrack(CameraTrack):
    """Poses that arrive with each plan, whose motion is scaled by the step of one key."""

    view: RayView

    @override
    def _shot(self, state: CameraState, plan: ChunkPlan) -> Shot:
        if plan.poses is None:
            raise InternalError(
                f"chunk {plan.chunk_index} of a live camera needs three poses, got none"
            )
        camera = self.view.fold_after_anchor(state.pose, plan.poses, translation_scale=MOVE_STEP)
        return camera, plan.poses[-1], state.pitch_rad


def create_camera_track(
    request: SessionRequest, geometry: VideoGeometry, *, dtype: torch.dtype, device: torch.device
) -> CameraTrack:
    """Prepare the camera of a session, whose tensors get ``dtype`` and ``device``.

    Raises:
        InternalError: if a recorded path comes without the length of the rollout.
    """
    view = RayView(geometry, dtype, device)
    match request.camera:
        case RecordedCamera() as source:
            if request.num_chunks is None:
                raise InternalError(
                    "a recorded path needs num_frames: its scale depends on the whole clip"
                )
            return RecordedTrack.of(source, num_chunks=request.num_chunks, view=view)
        case ScriptedKeys() as source:
            return ScriptedTrack(source, view)
        case LiveCamera():
            return LiveTrack(view)
