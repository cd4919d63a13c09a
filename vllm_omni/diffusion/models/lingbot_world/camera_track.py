"""A session's camera, walked chunk by chunk.

A *track* is a camera source with everything precomputed; a *state* is where it stands.
``next_chunk`` leaves the given state alone and returns the next one.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from vllm_omni.diffusion.camera_motion import MOVE_STEP, integrate_keys
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    LiveCamera,
    RecordedCamera,
    ScriptedKeys,
    SessionRequest,
)
from vllm_omni.diffusion.models.lingbot_world.camera import (
    build_rays,
    compute_dtype,
    fold_camera,
    framewise_deltas,
    reference_intrinsics,
)
from vllm_omni.diffusion.models.lingbot_world.resample import interpolate_camera_trajectory
from vllm_omni.errors import InvalidRequestError
from vllm_omni.platforms.transfer import to_device


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


def _fresh() -> CameraState:
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
    def of(cls, source: RecordedCamera, *, num_chunks: int, view: RayView) -> "RecordedTrack":
        """Resample the clip to the rollout's latent frames and take its deltas."""
        poses, intrinsics = interpolate_camera_trajectory(
            source.poses, source.intrinsics, num_chunks * LATENT_FRAMES_PER_CHUNK
        )
        wide = compute_dtype(view.dtype)
        # Copies: arrays that came through a pipe may be read-only, which torch cannot wrap.
        deltas = framewise_deltas(torch.tensor(poses, dtype=wide))
        return cls(deltas, torch.tensor(intrinsics, dtype=wide), view)

    def fresh(self) -> CameraState:
        """State before chunk 0."""
        return _fresh()

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

    def fresh(self) -> CameraState:
        """State before chunk 0: identity pose, level pitch."""
        return _fresh()

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
        poses, pitch_rad = integrate_keys(frames, state.pose, state.pitch_rad)
        camera = self.view.fold_after_anchor(state.pose, poses, translation_scale=None)
        return camera, CameraState(state.next_chunk_index + 1, poses[-1], pitch_rad)


@dataclass(frozen=True, slots=True)
class LiveTrack:
    """Poses that arrive with each plan, in controller units (one key step is full speed)."""

    view: RayView

    def fresh(self) -> CameraState:
        """State before chunk 0: identity pose."""
        return _fresh()

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
"""``fresh()`` gives the state before chunk 0; ``next_chunk(state, plan)`` gives the camera tensor
of the chunk after ``state`` and the state after it, or raises InvalidRequestError where the plan
does not fit the source or the source has ended."""


def create_camera_track(
    request: SessionRequest, geometry: VideoGeometry, *, dtype: torch.dtype, device: torch.device
) -> CameraTrack:
    """Prepare the camera of a session; its tensors get ``dtype`` and stand on ``device``.

    Raises:
        InvalidRequestError: if a recorded path is asked to go on for ever.
    """
    view = RayView(geometry, dtype, device)
    match request.camera:
        case RecordedCamera() as source:
            if request.num_chunks is None:
                raise InvalidRequestError(
                    "a recorded path needs num_frames: its scale depends on the whole clip",
                    field="extra_args.action_path",
                )
            return RecordedTrack.of(source, num_chunks=request.num_chunks, view=view)
        case ScriptedKeys() as source:
            return ScriptedTrack(source, view)
        case LiveCamera():
            return LiveTrack(view)
