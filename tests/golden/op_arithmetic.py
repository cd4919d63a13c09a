"""Experiments without a checkpoint: schedule, timestep sinusoid, rotary tables, camera."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.golden.recipe import Job, Run
from tests.helpers.rays import path_rays
from vllm_omni.diffusion.camera_motion import integrate_keys, normalise_keys, quaternion_of
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.rope import RotaryEmbeddingWan, timestep_sinusoid
from vllm_omni.diffusion.models.lingbot_world.camera import (
    RayView,
    fold_camera,
    framewise_deltas,
    interpolate_camera_trajectory,
    reference_intrinsics,
)
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule

_CPU = torch.device("cpu")


def schedule(job: Job) -> list[Run]:
    """The four steps of a flow shift."""
    made = DmdSchedule.with_shift(job.keys.number("flow_shift"))
    return _one(job, sigmas=_wide(made.sigmas), timesteps=_wide(made.timesteps))


def sinusoid(job: Job) -> list[Run]:
    """The sinusoidal embedding of timesteps, which are rounded to float32 first."""
    times = torch.tensor(job.keys.take("timesteps"), dtype=torch.float32)
    return _one(job, table=timestep_sinusoid(times, job.keys.integer("dim")))


def rotary(job: Job) -> list[Run]:
    """Columns of the temporal axis of the rotary tables, one row per latent frame."""
    embedding = RotaryEmbeddingWan(job.keys.integer("head_dim"))
    tables = embedding.tables(
        start_latent_frame=job.keys.integer("start_frame"),
        latent_frames=job.keys.integer("frames"),
        rows=1,
        columns=1,
        dtype=torch.float32,
        device=_CPU,
    )
    pairs = embedding.axis_dims[0] // 2
    return _one(job, cos=tables.cos[:, :pairs], sin=tables.sin[:, :pairs])


def resample(job: Job) -> list[Run]:
    """A camera path at another number of frames."""
    poses, intrinsics = _path(job)
    count = job.keys.integer("frames")
    made = interpolate_camera_trajectory(poses.numpy(), intrinsics.numpy(), count)
    return _one(job, poses=torch.from_numpy(made[0]), intrinsics=torch.from_numpy(made[1]))


def quaternions(job: Job) -> list[Run]:
    """Rotations of poses as quaternions (w, x, y, z)."""
    rotations = job.tensor("poses")[:, :3, :3].numpy()
    made = np.stack([quaternion_of(rotation) for rotation in rotations])
    return _one(job, quaternions=torch.from_numpy(made))


def deltas(job: Job) -> list[Run]:
    """The motion of each pose since the one before."""
    poses = job.tensor("poses").to(job.dtype())
    return _one(job, deltas=framewise_deltas(poses, _scale(job)))


def rays(job: Job) -> list[Run]:
    """Rays of every pixel of a camera path, plain and folded."""
    poses, intrinsics = _path(job)
    made = path_rays(
        poses,
        intrinsics,
        height=job.keys.integer("height"),
        width=job.keys.integer("width"),
        translation_scale=_scale(job),
        dtype=job.dtype(),
    )
    return _one(job, rays=made, **({"folded": fold_camera(made)} if "folded" in job.wanted else {}))


def keys(job: Job) -> list[Run]:
    """Poses of keys held frame by frame in one pass, and the pitch after each chunk."""
    frames = [normalise_keys(held) for held in _listed(job)]
    pose, pitch, pitches = np.eye(4), 0.0, []
    for first in range(0, len(frames), LATENT_FRAMES_PER_CHUNK):
        poses, pitch = integrate_keys(frames[first : first + LATENT_FRAMES_PER_CHUNK], pose, pitch)
        pose = poses[-1]
        pitches.append(pitch)
    whole = torch.from_numpy(integrate_keys(frames, np.eye(4), 0.0)[0])
    return _one(job, poses=whole, pitch_per_chunk=_wide(pitches))


def intrinsics(job: Job) -> list[Run]:
    """The camera of keys and live sessions."""
    size = {side: job.keys.integer(side) for side in ("width", "height")}
    return _one(job, intrinsics=torch.from_numpy(reference_intrinsics(**size))[None])


def live_rays(job: Job) -> list[Run]:
    """Folded rays of poses that follow the identity, at the camera of live sessions."""
    geometry = VideoGeometry(job.keys.integer("height"), job.keys.integer("width"))
    view = RayView(geometry, job.dtype(), _CPU)
    poses = job.tensor("poses")[_rows(job)].numpy()
    folded = view.fold_after_anchor(np.eye(4), poses, translation_scale=_scale(job))
    return _one(job, folded=folded)


def _one(job: Job, **made: torch.Tensor) -> list[Run]:
    job.keys.done()
    return [Run("", made)]


def _wide(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _scale(job: Job) -> float | None:
    """The divisor of translations; ``"longest step"`` in words."""
    value = job.keys.take("translation_scale")
    return None if value == "longest step" else float(value)


def _path(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _rows(job)
    return job.tensor("poses")[rows], job.tensor("intrinsics")[rows]


def _rows(job: Job) -> slice | list[int]:
    """Which frames of a path: ``"all"``, a number for the first ones, or a list of them."""
    rows = job.keys.take("rows")
    if isinstance(rows, list):
        return rows
    return slice(None if rows == "all" else int(rows))


def _listed(job: Job) -> list[Any]:
    return job.archive.resolved(job.keys.take("keys"))
