"""Scenes begin where one can walk and come in any size; the recorded path is rigid and smooth."""

import numpy as np
import pytest

from vllm_omni.diffusion.utils.island import BAND_PIXELS, LIGHTS
from vllm_omni.diffusion.utils.scenes import (
    INTRINSICS,
    SCENES,
    first_picture,
    gliding_path,
    write_camera_path,
)
from vllm_omni.errors import ConfigError
from vllm_omni.tools.toy_world.prompts import PROMPTS
from vllm_omni.tools.toy_world.walks import Walker, script, script_motions

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def _pixels(name: str, height: int = 64, width: int = 96) -> np.ndarray:
    return np.asarray(first_picture(name, height=height, width=width))


@pytest.mark.parametrize("name", SCENES)
def test_its_walk_has_eight_chunks_and_meets_nothing_solid(name):
    view = SCENES[name].view
    walker = Walker(view.x, view.z, view.heading)
    keys = script(SCENES[name].keys)
    assert len(keys) == 24
    for motion in script_motions(keys):
        walker.step(motion)
        assert not walker.hit


def test_each_light_has_a_scene_whose_prompt_the_training_knew():
    assert tuple(SCENES) == LIGHTS
    for light, scene in enumerate(SCENES.values()):
        assert (light, scene.prompt) in PROMPTS


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("height", "width"), [(64, 96), (97, 31), (1, 1)])
def test_any_size_and_twice_the_same(name, height, width):
    first = _pixels(name, height, width)
    assert first.shape == (height, width, 3)
    assert np.array_equal(first, _pixels(name, height, width))


def test_scenes_differ():
    pictures = [_pixels(name).astype(float) for name in SCENES]
    for index, picture in enumerate(pictures):
        assert all(np.abs(picture - other).mean() > 20 for other in pictures[:index])


def test_a_large_picture_is_the_small_one_with_more_detail():
    """Lossy: edges are smoothed differently, so the mean over the picture is compared.

    The large one is painted in several bands, the small one in one.
    """
    assert 96 * 160 < BAND_PIXELS < 384 * 640
    large = _pixels("day", 384, 640).reshape(96, 4, 160, 4, 3).mean(axis=(1, 3))
    assert np.abs(large - _pixels("day", 96, 160)).mean() < 1


def test_bad_requests_are_refused():
    with pytest.raises(ConfigError, match="day, dusk, night"):
        first_picture("beach", height=64, width=96)
    with pytest.raises(ConfigError, match="64x0"):
        first_picture("day", height=0, width=64)


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
