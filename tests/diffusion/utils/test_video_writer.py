"""The MP4 holds every frame at its time, appears whole or not at all, and costs no memory."""

import os
import subprocess
import sys

import av
import numpy as np
import psutil
import pytest

from tests.helpers.moving_picture import HEIGHT, WIDTH, moving_picture
from vllm_omni.diffusion.utils.video_writer import VideoWriter, contact_sheet
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

FRAMES = list(np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8))


def test_frames_come_back_in_order_and_on_time(tmp_path):
    """Lossy: H.264 at 4:2:0; a wrong colour matrix or a swapped frame would exceed 4 levels."""
    frames = moving_picture(45)
    path = tmp_path / "new" / "video.mp4"
    with VideoWriter(path, fps=16, width=WIDTH, height=HEIGHT) as writer:
        for chunk in (frames[:9], frames[9:21], frames[21:]):
            writer.write(chunk)
    with av.open(str(path)) as container:
        decoded = list(container.decode(video=0))
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in decoded])
    assert [float(frame.time) for frame in decoded] == [index / 16 for index in range(45)]
    error = np.abs(pixels.astype(int) - frames).mean(axis=(1, 2, 3))
    assert error.max() < 4
    assert [item.name for item in path.parent.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize("fps", [12.5, 23.976])
def test_fractional_rates_are_kept(tmp_path, fps):
    with VideoWriter(tmp_path / "v.mp4", fps=fps, width=WIDTH, height=HEIGHT) as writer:
        writer.write(moving_picture(9))
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-4)


def _write_and_fail(writer: VideoWriter) -> None:
    with writer:
        writer.write(moving_picture(9))
        raise RuntimeError("chunk 1 failed")


def test_an_error_leaves_the_earlier_file_and_nothing_else(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(b"earlier")
    writer = VideoWriter(path, fps=16, width=WIDTH, height=HEIGHT)
    with pytest.raises(RuntimeError, match="chunk 1"):
        _write_and_fail(writer)
    assert [item.name for item in tmp_path.iterdir()] == ["video.mp4"]
    assert path.read_bytes() == b"earlier"


_WRITE_BLOCKS = """
import sys
from pathlib import Path
import numpy as np
from vllm_omni.diffusion.utils.video_writer import VideoWriter
blocks = np.random.default_rng(0).integers(0, 256, (45, 8, 12, 3), dtype=np.uint8)
with VideoWriter(Path(sys.argv[1]), fps=16, width=96, height=64) as writer:
    writer.write(blocks.repeat(8, axis=1).repeat(8, axis=2))
"""


def test_the_same_pixels_make_the_same_file(tmp_path):
    """Bitwise, whatever stands in the memory that the encoder is given (glibc fills it here)."""
    files = [tmp_path / name for name in ("0", "1", "170")]
    for file in files:
        environment = {**os.environ, "MALLOC_PERTURB_": file.name}
        subprocess.run(
            [sys.executable, "-c", _WRITE_BLOCKS, str(file)],
            env=environment,
            check=True,
            timeout=60,
        )
    assert len({file.read_bytes() for file in files}) == 1


def test_no_frame_no_file(tmp_path):
    with VideoWriter(tmp_path / "v.mp4", fps=16, width=WIDTH, height=HEIGHT):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad", [{"width": 95}, {"height": 0}, {"fps": 0}, {"fps": -1}, {"fps": float("nan")}]
)
def test_bad_settings_touch_nothing(tmp_path, bad):
    settings = {"fps": 16, "width": WIDTH, "height": HEIGHT} | bad
    with pytest.raises(ConfigError):
        VideoWriter(tmp_path / "v.mp4", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_frame_of_another_size_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"\(64, 96, 3\)"),
        VideoWriter(tmp_path / "v.mp4", fps=16, width=WIDTH, height=HEIGHT) as writer,
    ):
        writer.write(np.zeros((1, 32, 32, 3), np.uint8))


@pytest.mark.advanced_model
def test_memory_does_not_grow_with_length(tmp_path):
    """3000 frames are 55 MB of pixels; the ceiling is a fifth of what keeping them would cost."""
    process = psutil.Process()
    chunk = moving_picture(100)
    with VideoWriter(tmp_path / "v.mp4", fps=16, width=WIDTH, height=HEIGHT) as writer:
        for _ in range(5):
            writer.write(chunk)
        before_bytes = process.memory_info().rss
        for _ in range(30):
            writer.write(chunk)
        grown_bytes = process.memory_info().rss - before_bytes
    assert grown_bytes < 3000 * HEIGHT * WIDTH * 3 / 5


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
