"""Turns the bytes of a video stream into a file that every player opens."""

import io
import tempfile
from fractions import Fraction
from pathlib import Path

import av
from av.container import InputContainer
from av.error import FFmpegError

from vllm_omni.errors import InvalidRequestError

_INPUT_FORMATS = frozenset({"m4s", "mp4"})


def finalize_streaming_video_bytes(
    data: bytes, input_format: str = "m4s", fps: float | int | None = None
) -> bytes:
    """Remux a fragmented MP4, as it came over the socket, into a plain one with its index first.

    The pictures are copied, not encoded again. A stream that was cut off keeps its whole frames.

    Args:
        data: initialisation segment and fragments, in order.
        input_format: ``"m4s"`` or ``"mp4"``; both mean fragmented MP4.
        fps: play at this constant rate; ``None`` keeps the stream's own timestamps.

    Raises:
        InvalidRequestError: for another format, or bytes without a readable video stream.
        OSError: if the folder for temporary files cannot hold the video.
    """
    if input_format not in _INPUT_FORMATS:
        raise InvalidRequestError(
            f"input_format must be one of {sorted(_INPUT_FORMATS)}, got {input_format!r}"
        )
    if fps is not None and not 0 < fps <= 1000:
        raise InvalidRequestError(f"fps must be in (0, 1000], got {fps}")
    try:
        with av.open(io.BytesIO(data), "r", format="mp4") as source:
            return _remux(source, fps)
    except OSError:
        raise  # The system's word on the temporary file; FFmpeg's word on the bytes is another.
    except (FFmpegError, IndexError) as error:
        raise InvalidRequestError(
            f"{len(data)} bytes hold no readable fragmented MP4 video"
        ) from error


def _remux(source: InputContainer, fps: float | int | None) -> bytes:
    video = source.streams.video[0]
    packets = [packet for packet in source.demux(video) if packet.pts is not None]
    if fps is not None:
        _retime(packets, Fraction(fps).limit_denominator(1001))
    # The index moves to the front in a second pass over the output, which needs a real file.
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "video.mp4"
        with av.open(str(path), "w", options={"movflags": "+faststart"}) as target:
            stream = target.add_stream_from_template(video)
            for packet in packets:
                packet.stream = stream
                target.mux(packet)
        return path.read_bytes()


def _retime(packets: list[av.Packet], fps: Fraction) -> None:
    """Give frame ``i`` in the order of display the time ``i / fps``, exactly."""
    shown = [packet.pts for packet in packets if packet.pts is not None]
    rank = {pts: index for index, pts in enumerate(sorted(shown))}
    # B-frames are decoded later than their place on the screen; decoding times move ahead by that.
    delay = max((index - rank[pts] for index, pts in enumerate(shown)), default=0)
    for index, (packet, pts) in enumerate(zip(packets, shown, strict=True)):
        packet.pts, packet.dts, packet.duration = rank[pts], index - delay, 1
        packet.time_base = 1 / fps
