"""Frames as files: an H.264 MP4 that is written while they arrive, and a contact sheet."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from vllm_omni.errors import ConfigError

_BT709 = 1
"""Code point of ITU-T H.273 for matrix, primaries and transfer, so that players need not guess."""


class VideoWriter:
    """An MP4 file that appears under its name only when it is complete.

    Use it as a context manager. Frames go to a temporary file beside ``path``; leaving the block
    normally renames it, an exception removes it.

    Args:
        path: file to write; replaced if it exists.
        fps: pixel frames per second.
        width: even number of pixels.
        height: even number of pixels.
        crf: x264's constant quality, lower is better.

    Raises:
        ConfigError: for an odd or empty size or a rate that is not positive.
    """

    def __init__(
        self, path: Path, *, fps: float | int, width: int, height: int, crf: int = 18
    ) -> None:
        if width < 2 or height < 2 or width % 2 or height % 2:
            raise ConfigError(f"H.264 needs even sides of at least 2, got {width}x{height}")
        if not 0 < fps <= 1000:
            raise ConfigError(f"fps must be in (0, 1000], got {fps}")
        self.path = path
        self.pixel_frames = 0
        self._temporary = path.with_name(f".{path.name}.part")
        self._shape = (height, width, 3)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(
            str(self._temporary), "w", format="mp4", options={"movflags": "+faststart"}
        )
        rate = Fraction(fps).limit_denominator(1001)
        # Beside B-frames, x264's macroblock tree reads memory that nobody wrote: the same pixels
        # would now and then make another file.
        options = {"crf": str(crf), "x264-params": "mbtree=0"}
        self._stream = self._container.add_stream("libx264", rate=rate, options=options)
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709

    def write(self, frames: UInt8[np.ndarray, "pixel_frames height width 3"]) -> None:
        """Encode frames, RGB. Only the encoder's own look-ahead stays in memory."""
        if frames.shape[1:] != self._shape:
            raise ConfigError(f"frames of {self._shape} were announced, got {frames.shape[1:]}")
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709")
            frame.pts = self.pixel_frames
            frame.time_base = 1 / self._stream.codec_context.framerate
            self._container.mux(self._stream.encode(frame))
            self.pixel_frames += 1

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None or self.pixel_frames == 0:
            self._discard()
            return
        try:
            self._container.mux(self._stream.encode(None))
            self._container.close()
            self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _discard(self) -> None:
        try:
            self._container.close()
        finally:
            self._temporary.unlink(missing_ok=True)


_MARGIN_PIXELS = 6
_CAPTION_PIXELS = 14
_PAPER = (24, 24, 28)
_INK = (220, 220, 220)


def contact_sheet(
    frames: Sequence[UInt8[np.ndarray, "height width 3"]],
    *,
    captions: Sequence[str],
    columns: int = 4,
) -> Image.Image:
    """One picture with a caption under each frame, row by row.

    Args:
        frames: at least one, RGB, all of one size.
        captions: one for each frame.
        columns: frames in a row.

    Raises:
        ValueError: if the numbers of frames and captions differ, or there is no frame.
    """
    if not frames or len(frames) != len(captions):
        raise ValueError(f"got {len(frames)} frames and {len(captions)} captions")
    height, width = frames[0].shape[:2]
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    step_x, step_y = width + _MARGIN_PIXELS, height + _CAPTION_PIXELS + _MARGIN_PIXELS
    size = (_MARGIN_PIXELS + columns * step_x, _MARGIN_PIXELS + rows * step_y)
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    for index, (frame, caption) in enumerate(zip(frames, captions, strict=True)):
        row, column = divmod(index, columns)
        left, top = _MARGIN_PIXELS + column * step_x, _MARGIN_PIXELS + row * step_y
        sheet.paste(Image.fromarray(np.ascontiguousarray(frame)), (left, top))
        pen.text((left, top + height), caption, fill=_INK)
    return sheet
