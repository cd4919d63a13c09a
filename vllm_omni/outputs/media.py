"""H.264 video as it goes to clients, fragmented MP4 chunk by chunk, and back to pixels there.

Everything here is CPU work of tens of milliseconds per chunk: call it from a worker thread.
"""

import io
from fractions import Fraction

import av
import numpy as np
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from jaxtyping import UInt8

from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.logger import get_logger
from vllm_omni.outputs import mp4_boxes

logger = get_logger(__name__)

SOFTWARE = "libx264"
TICKS_PER_FRAME = 1000
"""Resolution of time stamps: players round to ticks, so a frame has many."""
ENDLESS_GOP_FRAMES = 1_000_000
"""Key frames come where they are asked for, at chunk starts, and nowhere by count."""

# Bit-exact conversion gives the same bytes on every CPU; the plain one depends on its vector units.
_CONVERSION = (
    Interpolation.BILINEAR
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
    | Interpolation.FULL_CHR_H_INP
)
# One thread: with several, x264 in its latency mode cuts pictures into one slice per thread, so
# bytes would depend on the number of cores. A chunk takes about a tenth of its playing time.
_THREADS = 1


class ChunkEncoder:
    """One session's video: BT.709 limited range, yuv420p, no B-frames, a key frame per chunk.

    The returned payloads, concatenated, are one playable file; each holds all frames that it was
    given. The same frames and options give the same bytes on any machine with the same
    libx264. Not thread-safe: one call at a time.

    Args:
        width: pixels, even.
        height: pixels, even.
        fps: frames per second; fractions are kept to a denominator of 1001.
        codec: FFmpeg's name of the encoder; libx264 stands in for one that does not open.
    """

    def __init__(
        self,
        width: int,
        height: int,
        fps: float | int,
        options: EncoderOptions | None = None,
        codec: str = SOFTWARE,
    ) -> None:
        rate = Fraction(fps).limit_denominator(1001)
        if rate <= 0 or width % 2 or height % 2 or min(width, height) < 2:
            raise ValueError(
                f"fps must be positive and sides even, got {fps} fps, {width}x{height}"
            )
        self._size = (height, width)
        self._time_base = 1 / rate
        self._ticks_per_frame = rate.denominator * TICKS_PER_FRAME
        self._codec = _open_codec((width, height), rate, options or EncoderOptions(), codec)
        self._reformatter = VideoReformatter()
        sps, pps = mp4_boxes.parameter_sets(bytes(self._codec.extradata or b""))
        self._track = mp4_boxes.Track(
            width=width,
            height=height,
            timescale=rate.numerator * TICKS_PER_FRAME,
            sps=sps,
            pps=pps,
        )
        self._frames = 0
        self._frames_written = 0
        self._chunks = 0
        self._closed = False

    def encode(self, frames: UInt8[np.ndarray, "pixel_frames height width 3"]) -> bytes:
        """Encode all ``frames`` (RGB) as one chunk; the first begins with ``ftyp`` + ``moov``."""
        self._require_open()
        if not len(frames) or frames.shape[1:3] != self._size:
            raise ValueError(f"need frames of {self._size}, got shape {frames.shape}")
        samples = []
        for index, rgb in enumerate(frames):
            frame = self._to_yuv(rgb)
            frame.pict_type = PictureType.I if index == 0 else PictureType.NONE
            samples += [mp4_boxes.sample(bytes(packet)) for packet in self._codec.encode(frame)]
        if len(samples) != len(frames):
            raise RuntimeError(f"the encoder held back {len(frames) - len(samples)} frames")
        return self._written(samples)

    def finish(self) -> bytes:
        """Return what the encoder still holds, normally nothing; ends the stream."""
        self._require_open()
        samples = [mp4_boxes.sample(bytes(packet)) for packet in self._codec.encode(None)]
        self.close()
        return self._written(samples) if samples else b""

    def close(self) -> None:
        """Free the encoder; may be called again."""
        if not self._closed:
            self._closed = True
            del self._codec, self._reformatter

    def _to_yuv(self, rgb: UInt8[np.ndarray, "height width 3"]) -> av.VideoFrame:
        height, width = self._size
        source = av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(rgb), format="rgb24")
        frame = self._reformatter.reformat(
            source,
            width=width,
            height=height,
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            interpolation=_CONVERSION,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
            threads=_THREADS,
        )
        frame.pts, frame.time_base = self._frames, self._time_base
        self._frames += 1
        return frame

    def _written(self, samples: list[mp4_boxes.Sample]) -> bytes:
        self._chunks += 1
        payload = mp4_boxes.chunk(
            samples,
            sequence_number=self._chunks,
            decode_time=self._frames_written * self._ticks_per_frame,
            duration=self._ticks_per_frame,
        )
        self._frames_written += len(samples)
        return payload if self._chunks > 1 else mp4_boxes.initialization(self._track) + payload

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the encoder is closed")


def _open_codec(
    size: tuple[int, int], rate: Fraction, options: EncoderOptions, name: str
) -> av.VideoCodecContext:
    try:
        codec = av.CodecContext.create(name, "w")
        assert isinstance(codec, av.VideoCodecContext), "the setting names encoders of video"
        codec.width, codec.height = size
        codec.pix_fmt = "yuv420p"
        codec.time_base, codec.framerate = 1 / rate, rate
        codec.gop_size, codec.max_b_frames = ENDLESS_GOP_FRAMES, 0
        codec.thread_count = _THREADS
        codec.colorspace = codec.color_primaries = codec.color_trc = mp4_boxes.BT709
        codec.color_range = ColorRange.MPEG
        if options.bitrate is not None:
            codec.bit_rate = options.bitrate
        chosen = options.ffmpeg_options() if name == SOFTWARE else options.nvenc_options()
        codec.options = {**chosen, "forced-idr": "1"}
        codec.flags |= Flags.global_header
        codec.open()
    except (FFmpegError, ValueError) as error:
        if name == SOFTWARE:
            raise
        logger.warning("%s does not open, %s stands in for it: %s", name, SOFTWARE, error)
        return _open_codec(size, rate, options, SOFTWARE)
    return codec


class FrameDecoder:
    """Decodes the parts of one fragmented MP4, each of which needs those before it.

    Only H.264 without reordering is expected, as the server sends it: each part then gives all of
    its frames at once.
    """

    def __init__(self) -> None:
        self._header = b""
        self._decoder: av.VideoCodecContext | None = None

    def decode(self, part: bytes) -> UInt8[np.ndarray, "frames height width 3"]:
        """Pixel frames of the next part; the first one carries the description of the video."""
        if not self._header:
            self._header = part[: part.index(b"moof") - 4]
            part = part[len(self._header) :]
        frames = []
        with av.open(io.BytesIO(self._header + part), "r", format="mp4") as container:
            stream = container.streams.video[0]
            if self._decoder is None:
                self._decoder = av.VideoCodecContext.create("h264", "r")
                self._decoder.extradata = stream.codec_context.extradata
                self._decoder.thread_count = 1  # several threads hold frames back
            for packet in container.demux(stream):
                if packet.size:
                    frames += self._decoder.decode(packet)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
