"""Chunks of fragmented MP4 against FFmpeg's own demuxer and decoder."""

import io
from typing import get_args

import av
import numpy as np
import pytest

from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.outputs.media import ChunkEncoder

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

HEIGHT, WIDTH = 48, 64
CHUNKS = (9, 12, 12)


def movie(frames: int, seed: int = 0) -> np.ndarray:
    """A texture that moves, with a cut in the middle."""
    rng = np.random.default_rng(seed)
    wide = rng.integers(0, 256, (HEIGHT, WIDTH + 3 * frames, 3), dtype=np.uint8)
    shots = [wide[:, 3 * i : 3 * i + WIDTH] for i in range(frames)]
    return np.stack([255 - one if i > frames // 2 else one for i, one in enumerate(shots)])


def encoded(fps: float = 16, options: EncoderOptions | None = None) -> list[bytes]:
    encoder = ChunkEncoder(WIDTH, HEIGHT, fps, options)
    frames = movie(sum(CHUNKS))
    ends = np.cumsum(CHUNKS)
    payloads = [encoder.encode(frames[e - n : e]) for n, e in zip(CHUNKS, ends, strict=True)]
    assert encoder.finish() == b""
    return payloads


def decoded(data: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data)) as container:
        return list(container.decode(video=0))


def rgb(frame: av.VideoFrame) -> np.ndarray:
    return frame.to_ndarray(
        format="rgb24", src_colorspace="ITU709", src_color_range="MPEG", dst_color_range="JPEG"
    )


def test_every_prefix_of_chunks_is_a_file_with_all_its_frames():
    payloads = encoded()
    for count in range(1, len(CHUNKS) + 1):
        assert len(decoded(b"".join(payloads[:count]))) == sum(CHUNKS[:count])


def test_a_later_chunk_plays_after_the_header_alone():
    payloads = encoded()
    header = payloads[0][: payloads[0].index(b"moof") - 4]
    frames = decoded(header + payloads[2])
    assert len(frames) == 12
    assert frames[0].key_frame


@pytest.mark.parametrize("fps", [1, 12.5, 16, 24000 / 1001, 29.97, 100 / 3, 60])
def test_time_stamps_are_frame_numbers(fps):
    frames = decoded(b"".join(encoded(fps)))
    times = [float(frame.time) * fps for frame in frames]
    # Equal up to the rational that stands for the rate: denominators to 1001 are within 1e-6.
    np.testing.assert_allclose(times, np.arange(sum(CHUNKS)), rtol=1e-5, atol=1e-9)


def test_each_chunk_starts_with_a_key_picture_and_none_are_reordered():
    with av.open(io.BytesIO(b"".join(encoded()))) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    keys = [index for index, packet in enumerate(packets) if packet.is_keyframe]
    assert set(keys) >= {0, 9, 21}
    assert all(packet.pts == packet.dts for packet in packets)


def test_the_stream_says_what_it_is():
    with av.open(io.BytesIO(encoded()[0])) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.width, context.height, context.pix_fmt) == (WIDTH, HEIGHT, "yuv420p")
        assert (context.colorspace, context.color_primaries, context.color_trc) == (1, 1, 1)
        assert context.color_range == 1
        assert stream.codec.name == "h264"
        assert context.profile == "Constrained Baseline"


@pytest.mark.parametrize(
    "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 0, 0), (255, 255, 255)]
)
def test_pure_colours_survive_within_two_levels(colour):
    """Lossy: 8-bit limited range has 220 luma levels, so one level of rounding each way."""
    encoder = ChunkEncoder(WIDTH, HEIGHT, 16)
    flat = np.broadcast_to(np.array(colour, np.uint8), (9, HEIGHT, WIDTH, 3))
    frames = decoded(encoder.encode(np.ascontiguousarray(flat)))
    error = max(np.abs(rgb(one).astype(int) - colour).max() for one in frames)
    assert error <= 2


def test_pictures_arrive_in_order_and_recognisable():
    """Lossy: crf 18 on smooth pictures; a neighbour in time is ten levels away."""
    encoder = ChunkEncoder(WIDTH, HEIGHT, 16)
    levels = np.arange(20, 20 + 9 * 20, 20, dtype=np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (9, HEIGHT, WIDTH, 3)).copy()
    means = [rgb(one).mean() for one in decoded(encoder.encode(frames))]
    np.testing.assert_allclose(means, levels, atol=3)


def test_same_input_same_bytes():
    """Bitwise, within one build of the encoder."""
    assert encoded() == encoded()


def test_bytes_do_not_depend_on_the_number_of_cores():
    """Bitwise: one slice per picture, whatever the machine has."""
    payload = encoded(16)[0]
    with av.open(io.BytesIO(payload)) as container:
        packet = next(iter(container.demux(video=0)))
        data, slices = bytes(packet), 0
        while data:
            size = int.from_bytes(data[:4], "big")
            slices += data[4] & 31 in {1, 5}
            data = data[4 + size :]
    assert slices == 1


def choices(option: str) -> tuple[str, ...]:
    return get_args(EncoderOptions.model_fields[option].annotation)


@pytest.mark.parametrize("preset", choices("preset"))
def test_no_preset_holds_frames_back(preset):
    assert len(decoded(b"".join(encoded(options=EncoderOptions(preset=preset))))) == 33


@pytest.mark.parametrize("tune", choices("tune"))
def test_no_tune_holds_frames_back(tune):
    assert len(decoded(b"".join(encoded(options=EncoderOptions(tune=tune))))) == 33


def test_a_bit_rate_and_a_quality_take_effect():
    size = {
        name: len(b"".join(encoded(options=options)))
        for name, options in {
            "default": EncoderOptions(),
            "coarse": EncoderOptions(crf=40.0),
            "slow line": EncoderOptions(bitrate=50_000),
            "fast line": EncoderOptions(bitrate=20_000_000),
        }.items()
    }
    assert size["coarse"] < size["default"] / 2
    assert size["slow line"] < size["fast line"] / 2


def test_the_finished_file_has_its_index_in_front_and_the_same_pictures():
    """Bitwise: the coded pictures are copied."""
    stream = b"".join(encoded(12.5))
    finished = finalize_streaming_video_bytes(stream)
    assert finished == finalize_streaming_video_bytes(stream)
    assert finished.index(b"moov") < finished.index(b"mdat")
    assert b"moof" not in finished
    before, after = decoded(stream), decoded(finished)
    assert len(after) == 33
    for one, other in zip(before, after, strict=True):
        assert one.time == other.time
        assert np.array_equal(one.to_ndarray(), other.to_ndarray())


def test_wrong_frames_and_use_after_the_end_are_refused():
    encoder = ChunkEncoder(WIDTH, HEIGHT, 16)
    for frames in (np.zeros((9, WIDTH, HEIGHT, 3), np.uint8), movie(3)[:0]):
        with pytest.raises(ValueError, match="need frames of"):
            encoder.encode(frames)
    encoder.close()
    encoder.close()
    with pytest.raises(ValueError, match="closed"):
        encoder.encode(movie(3))
    with pytest.raises(ValueError, match="closed"):
        encoder.finish()


@pytest.mark.parametrize(("width", "height", "fps"), [(63, 48, 16), (64, 0, 16), (64, 48, 0)])
def test_impossible_videos_are_refused(width, height, fps):
    with pytest.raises(ValueError, match="fps must be positive and sides even"):
        ChunkEncoder(width, height, fps)


@pytest.mark.parametrize("codec", ["h264_nvenc", "no_such_encoder"])
def test_software_stands_in_for_an_encoder_that_does_not_open(codec, caplog, monkeypatch):
    """Bitwise what the software makes, where there is no GPU or FFmpeg lacks the encoder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    frames = movie(12)
    with caplog.at_level("WARNING"):
        made = ChunkEncoder(WIDTH, HEIGHT, 16, codec=codec).encode(frames)
    assert made == ChunkEncoder(WIDTH, HEIGHT, 16).encode(frames)
    assert f"{codec} does not open, libx264 stands in for it" in caplog.text
