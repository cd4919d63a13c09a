"""The scenes begin where one can walk, differ from each other, and come in any size."""

import numpy as np
import pytest

from vllm_omni.diffusion.utils.island import BAND_PIXELS, LIGHTS
from vllm_omni.diffusion.utils.scenes import SCENES, first_picture
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
