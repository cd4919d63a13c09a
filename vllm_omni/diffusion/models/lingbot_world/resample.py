"""Camera paths resampled to another number of frames, without torch."""

import numpy as np
from jaxtyping import Float

from vllm_omni.diffusion.camera_motion import matrix_of, quaternion_of, slerp


def interpolate_camera_trajectory(
    poses: Float[np.ndarray, "source_frames 4 4"],
    intrinsics: Float[np.ndarray, "source_frames 4"],
    num_frames: int,
) -> tuple[Float[np.ndarray, "frames 4 4"], Float[np.ndarray, "frames 4"]]:
    """Spread ``num_frames`` frames evenly over a path, ends included.

    Translations and intrinsics are interpolated linearly, rotations spherically, in float64; the
    results have the dtypes of the inputs. Equal counts are returned untouched and a single source
    frame is repeated.
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
