"""Only motion between frames steers, wherever a camera stands and for however long it walks."""

import numpy as np
import pytest
import torch

from vllm_omni.diffusion.camera_motion import MOVE_STEP, CameraVelocity, integrate_keys
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import RecordedCamera
from vllm_omni.diffusion.models.lingbot_world.camera import (
    RayView,
    RecordedTrack,
    framewise_deltas,
    interpolate_camera_trajectory,
)
from vllm_omni.inputs.camera import RecordedPath, read_camera

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

VIEW = RayView(VideoGeometry(64, 96), torch.float32, torch.device("cpu"))
STEPS_PER_DAY = 4 * 24 * 3600
"""Latent frames of a day at 16 frames a second."""
FLOAT32_STEP = 4096 * 2.0**-24
"""What float32 may round off a step of one, at the farthest that it is used."""


def bent_path(origin, frames=21, unit=1.0):
    """A path that turns as it walks, in float64, with steps of some ``0.15 * unit``."""
    times = np.linspace(0.0, 3.0, frames)
    angles = 0.3 * np.sin(times)
    poses = np.tile(np.eye(4), (frames, 1, 1))
    poses[:, 0, 0] = poses[:, 2, 2] = np.cos(angles)
    poses[:, 0, 2] = np.sin(angles)
    poses[:, 2, 0] = -np.sin(angles)
    walk = np.stack([np.sin(times), 0 * times, times], axis=1)
    poses[:, :3, 3] = np.array(origin) + unit * walk
    return poses


def loaded(root, poses) -> RecordedCamera:
    np.save(root / "poses.npy", poses)
    np.save(root / "intrinsics.npy", np.tile([500.0, 500.0, 416.0, 240.0], (len(poses), 1)))
    return read_camera(RecordedPath(str(root), ".", len(poses)))


def motion(root, poses):
    """The motion that steers a rollout of a recorded path, from its files."""
    return RecordedTrack.of(loaded(root, poses), num_chunks=2, view=VIEW).deltas


@pytest.mark.parametrize(
    ("origin", "unit"),
    [
        ((1e5, 0, -1e5), 1.0),
        ((5e5, 12.5, 5e6), 1.0),
        ((-6.4e6, 6.4e6, 6.4e6), 1.0),
        ((0, 0, 1e8), 1.0),
        ((3.0, 4.0, 5.0), 1e-4),
        ((5e5, 0, 5e6), 1e-2),
    ],
    ids=["100 km", "UTM", "centre of the earth", "1e8", "a tenth of a millimetre", "UTM, slow"],
)
def test_a_recorded_path_far_away_moves_as_at_the_origin(tmp_path, origin, unit):
    # Reordered: float64 rounds positions of the file by 2**-53, two of them enter a step of at
    # least 0.1 units; float32 near the origin rounds by some 2**-24 of a step.
    near = motion(tmp_path, bent_path((0, 0, 0)))
    far = motion(tmp_path, bent_path(origin, unit=unit))
    bound = 2 * max(map(abs, origin)) * 2.0**-53 / (0.1 * unit) + 64 * 2.0**-24
    torch.testing.assert_close(far, near, rtol=0, atol=bound)


def test_a_path_that_begins_at_the_origin_and_leaps_far_keeps_its_steps(tmp_path):
    # A first camera at the origin, a leap of 1e6, then steps of 300: float32 rounds 1e6 by 0.03.
    poses = np.tile(np.eye(4), (21, 1, 1))
    poses[1:, 0, 3] = 1e6 + 300.0 * np.arange(20)
    deltas = RecordedTrack.of(loaded(tmp_path, poses[:6]), num_chunks=2, view=VIEW).deltas
    steps = deltas[2:, 0, 3] / deltas[2, 0, 3]
    torch.testing.assert_close(steps, torch.ones_like(steps), rtol=0, atol=2 * 0.04 / 300)


def test_a_loaded_path_far_away_survives_a_cast_to_float32(tmp_path):
    # Reordered: positions about the first camera are below 4; the shortest step is 0.1.
    near = loaded(tmp_path, bent_path((0, 0, 0))).poses.astype(np.float32)
    far = loaded(tmp_path, bent_path((5e5, 12.5, 5e6))).poses.astype(np.float32)
    np.testing.assert_allclose(far, near, rtol=0, atol=4 * 2.0**-24 + 5e6 * 2.0**-52)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("place", [(0, 0, 0), (1.3, -2.7, 4.1), (5e5, 12.5, 5e6)])
def test_a_camera_that_turns_in_place_does_not_move(tmp_path, place, dtype):
    # Bitwise: rounding noise must never be scaled up to the longest step.
    poses = bent_path(place, unit=0.0).astype(dtype)
    assert torch.equal(motion(tmp_path, poses)[:, :3, 3], torch.zeros(6, 3))


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [(0.0, "f8"), (1.25, "f8"), (-31.5, "f8"), (145.3, "f8"), (5680.0, "f4"), (5e5, "f4")],
)
def test_a_path_near_the_origin_or_of_float32_keeps_every_bit(tmp_path, offset, dtype):
    poses = bent_path((offset, -offset, offset)).astype(dtype)
    path, _ = interpolate_camera_trajectory(poses.astype(np.float32), np.ones((21, 4)), 6)
    assert torch.equal(motion(tmp_path, poses), framewise_deltas(torch.tensor(path)))


def test_the_longest_path_from_the_origin_keeps_every_bit(tmp_path):
    poses = np.tile(np.eye(4, dtype=np.float32), (4096, 1, 1))
    poses[:, 2, 3] = 0.37 * np.arange(4096)
    assert loaded(tmp_path, poses).poses.dtype == np.float32


@pytest.mark.parametrize("days", [0, 1, 9, 30])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_live_walk_of_days_moves_by_the_same_steps(days, axis):
    walk = np.tile(np.eye(4), (4, 1, 1))
    walk[:, axis, 3] = MOVE_STEP * (days * STEPS_PER_DAY + np.arange(4))
    rays = VIEW.fold_after_anchor(walk[0], walk[1:], MOVE_STEP)
    origins = rays[axis * 64 : (axis + 1) * 64]
    torch.testing.assert_close(origins, torch.ones_like(origins), rtol=0, atol=2 * FLOAT32_STEP)


def test_a_live_walk_near_the_origin_keeps_every_bit():
    poses = bent_path((3.0, 0.0, -20.0), frames=4)
    rays = VIEW.fold_after_anchor(poses[0], poses[1:], MOVE_STEP)
    deltas = framewise_deltas(torch.from_numpy(poses).float(), MOVE_STEP)[1:]
    folded = rays[:192].reshape(3, 64, 3, -1)[:, 0, :, 0].T
    assert torch.equal(folded, deltas[:, :3, 3])


def test_thirty_days_of_turning_leave_a_rotation():
    # Every product rounds the nine elements by a few 2**-53; this many errors of one sign add up.
    steps = 30 * STEPS_PER_DAY
    turn = CameraVelocity((0.0, 0.0, MOVE_STEP), (0.0, 0.02, 0.0, 0.9998)).matrix()[:3, :3]
    after = np.linalg.matrix_power(turn, steps)
    assert np.abs(after.T @ after - np.eye(3)).max() < steps * 8 * 2.0**-53


def test_keys_after_thirty_days_walk_by_one_step():
    pose = np.eye(4)
    pose[:3, 3] = 30 * STEPS_PER_DAY * MOVE_STEP
    poses, _ = integrate_keys([frozenset("w")] * 3, pose, 0.0)
    rays = VIEW.fold_after_anchor(pose, poses, None)
    torch.testing.assert_close(rays[128:192, 0], torch.ones(64, 8, 12), rtol=0, atol=1e-6)
