"""The path is rigid, smooth and of the length asked for."""

import numpy as np
import pytest

from vllm_omni.diffusion.utils.scenes import INTRINSICS, gliding_path, write_camera_path

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.mark.parametrize("pixel_frames", [1, 9, 45, 201])
def test_every_pose_is_a_rotation_and_a_translation(pixel_frames):
    """Up to float32 rounding: R R^T = 1 within 4 units of the last place, det R = 1."""
    poses = gliding_path(pixel_frames)
    assert poses.shape == (pixel_frames, 4, 4)
    rotation = poses[:, :3, :3].astype(np.float64)
    unit = np.broadcast_to(np.eye(3), rotation.shape)
    np.testing.assert_allclose(rotation @ rotation.transpose(0, 2, 1), unit, atol=5e-7)
    np.testing.assert_allclose(np.linalg.det(rotation), 1, atol=5e-7)
    assert np.array_equal(poses[0], np.eye(4, dtype=np.float32))
    assert np.array_equal(poses[:, 3], np.tile([0, 0, 0, 1], (pixel_frames, 1)))


def test_the_path_moves_forward_without_jerks():
    poses = gliding_path(201)
    steps = np.diff(poses[:, :3, 3], axis=0)
    assert (steps[:, 2] > 0).all()
    lengths = np.linalg.norm(steps, axis=1)
    assert np.abs(np.diff(lengths)).max() < 0.1 * lengths.max()
    view = poses[:, 0, 2]  # sine of the yaw: right first, then left
    assert view[:100].max() > 0.2
    assert view[100:].min() < -0.2


def test_the_two_files(tmp_path):
    poses = gliding_path(45)
    write_camera_path(tmp_path / "glide", poses)
    assert np.array_equal(np.load(tmp_path / "glide" / "poses.npy"), poses)
    intrinsics = np.load(tmp_path / "glide" / "intrinsics.npy")
    assert intrinsics.shape == (45, 4)
    assert (intrinsics == np.float32(INTRINSICS)).all()
