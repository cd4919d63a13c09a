"""Lays frames of a video out on one picture."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

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
