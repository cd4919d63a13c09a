"""The drawn pictures are the same every time, differ from each other and show what they claim."""

import numpy as np
import pytest

from vllm_omni.diffusion.utils.contact_sheet import contact_sheet
from vllm_omni.diffusion.utils.scenes import SCENES, draw_scene
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def _pixels(name: str, height: int = 96, width: int = 160) -> np.ndarray:
    return np.asarray(draw_scene(name, height=height, width=width))


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("height", "width"), [(64, 96), (97, 31), (1, 1)])
def test_any_size_and_twice_the_same(name, height, width):
    first = _pixels(name, height, width)
    assert first.shape == (height, width, 3)
    assert np.array_equal(first, _pixels(name, height, width))


def test_scenes_differ_in_shape_and_colour():
    pictures = [_pixels(name).astype(float) for name in SCENES]
    assert len(pictures) == 3
    for index, picture in enumerate(pictures):
        assert picture.std() > 30
        for other in pictures[:index]:
            assert np.abs(picture - other).mean() > 20


@pytest.mark.parametrize("name", SCENES)
def test_a_large_picture_is_the_small_one_with_more_detail(name):
    """Lossy: edges are smoothed differently, so the mean over the picture is compared."""
    large = _pixels(name, 192, 320).reshape(96, 2, 160, 2, 3).mean(axis=(1, 3))
    assert np.abs(large - _pixels(name)).mean() < 4


def test_bad_requests_are_refused():
    with pytest.raises(ConfigError, match="road, harbour, corridor"):
        draw_scene("beach", height=64, width=96)
    with pytest.raises(ConfigError, match="0x64"):
        draw_scene("road", height=64, width=0)


def test_contact_sheet_holds_every_frame_unchanged():
    frames = [_pixels(name, 64, 96) for name in SCENES]
    sheet = np.asarray(contact_sheet(frames, captions=list(SCENES), columns=2))
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (64, 96, 3))
    for frame in frames:
        corner = windows[..., 0, 0, :] == frame[0, 0]
        places = np.argwhere(corner.all(axis=-1).squeeze())
        assert any(np.array_equal(sheet[y : y + 64, x : x + 96], frame) for y, x in places)


@pytest.mark.parametrize(("frames", "captions"), [(0, []), (1, []), (1, ["a", "b"])])
def test_contact_sheet_needs_a_caption_for_each_frame(frames, captions):
    with pytest.raises(ValueError, match="captions"):
        contact_sheet([_pixels("road")] * frames, captions=captions)
