"""A recorded stream becomes a plain MP4 with the same pictures."""

import io

import av
import numpy as np
import pytest

from tests.helpers.moving_picture import HEIGHT, WIDTH, moving_picture
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def fragmented_mp4(pixel_frames: int, *, b_frames: int = 0) -> bytes:
    """A fragmented MP4 made by FFmpeg's own muxer, at 16 pixel frames per second."""
    buffer = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with av.open(buffer, "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=16, options={"g": "9", "bf": str(b_frames)})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for pixels in moving_picture(pixel_frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _decode(data: bytes) -> tuple[np.ndarray, list[float]]:
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), [
        float(frame.time) for frame in frames
    ]


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("fps", [None, 8, 16])
def test_pictures_are_copied_bitwise_and_the_index_comes_first(b_frames, fps):
    stream = fragmented_mp4(45, b_frames=b_frames)
    result = finalize_streaming_video_bytes(stream, fps=fps)
    before, times_before = _decode(stream)
    after, times_after = _decode(result)
    assert np.array_equal(after, before)
    assert len(after) == 45
    assert b"moof" not in result
    assert result.index(b"moov") < result.index(b"mdat")
    expected = times_before if fps is None else [index / fps for index in range(45)]
    assert times_after == pytest.approx(expected, abs=1e-3)


def test_a_stream_that_was_cut_off_keeps_its_whole_fragments():
    stream = fragmented_mp4(45)
    cut = stream[: stream.rindex(b"moof") - 4]
    pixels, _ = _decode(finalize_streaming_video_bytes(cut))
    assert 9 <= len(pixels) < 45


@pytest.mark.parametrize("data", [b"", b"not a video", b"\0" * 4096])
def test_bytes_that_are_no_video_are_refused(data):
    with pytest.raises(InvalidRequestError, match="no readable"):
        finalize_streaming_video_bytes(data)


@pytest.mark.parametrize("options", [{"input_format": "webm"}, {"fps": 0}, {"fps": -3}])
def test_bad_options_are_refused(options):
    with pytest.raises(InvalidRequestError):
        finalize_streaming_video_bytes(fragmented_mp4(9), **options)
