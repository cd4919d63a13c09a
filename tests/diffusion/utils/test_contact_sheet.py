"""A contact sheet holds its frames unchanged, each with a caption."""

import numpy as np
import pytest

from vllm_omni.diffusion.utils.video_writer import contact_sheet

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

FRAMES = list(np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8))


def test_contact_sheet_holds_every_frame_unchanged():
    sheet = np.asarray(contact_sheet(FRAMES, captions=["a", "b", "c"], columns=2))
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (64, 96, 3))
    for frame in FRAMES:
        corner = windows[..., 0, 0, :] == frame[0, 0]
        places = np.argwhere(corner.all(axis=-1).squeeze())
        assert any(np.array_equal(sheet[y : y + 64, x : x + 96], frame) for y, x in places)


@pytest.mark.parametrize(("frames", "captions"), [(0, []), (1, []), (1, ["a", "b"])])
def test_contact_sheet_needs_a_caption_for_each_frame(frames, captions):
    with pytest.raises(ValueError, match="captions"):
        contact_sheet(FRAMES[:frames], captions=captions)
