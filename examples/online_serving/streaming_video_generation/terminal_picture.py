"""Pixel frames in a terminal: two pixels for each character, in 24-bit colours."""

import asyncio
import shutil
import sys

import numpy as np
from PIL import Image

_HOME, _CLEAR, _RESET = "\x1b[H", "\x1b[2J", "\x1b[0m"
_ROWS_FOR_TEXT = 4
_MOST_WAITING = 24
"""Frames that wait to be shown; older ones are dropped, so that the picture stays near."""


def drawn(frame: np.ndarray, columns: int, rows: int) -> str:
    """A frame as text of at most ``columns`` x ``rows`` characters, its shape kept.

    The upper half block shows one pixel in the colour of text and the next one in that behind it.
    """
    picture = Image.fromarray(frame)
    picture.thumbnail((columns, 2 * rows))
    width, height = picture.width, picture.height - picture.height % 2
    pixels = np.asarray(picture)[:height]
    return "\n".join(
        "".join(
            "\x1b[38;2;{};{};{};48;2;{};{};{}m\u2580".format(*pixels[row, x], *pixels[row + 1, x])
            for x in range(width)
        )
        + _RESET
        for row in range(0, height, 2)
    )


class TerminalPicture:
    """Plays frames at their rate in the upper part of a terminal."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._waiting: asyncio.Queue[np.ndarray] = asyncio.Queue()

    def add(self, frames: np.ndarray) -> None:
        """Take the frames of a chunk, uint8 of shape ``[frames, height, width, 3]``."""
        for frame in frames:
            self._waiting.put_nowait(frame)
        while self._waiting.qsize() > _MOST_WAITING:
            self._waiting.get_nowait()

    async def play(self) -> None:
        """Show frame after frame until cancelled."""
        sys.stdout.write(_CLEAR)
        while True:
            frame = await self._waiting.get()
            size = shutil.get_terminal_size()
            text = drawn(frame, size.columns, size.lines - _ROWS_FOR_TEXT)
            sys.stdout.write(f"{_HOME}{text}\n")
            sys.stdout.flush()
            await asyncio.sleep(1 / self._fps)
