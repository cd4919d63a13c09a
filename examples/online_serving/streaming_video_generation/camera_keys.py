"""Keys of a terminal, and the camera movement that they stand for."""

import asyncio
import os
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_omni.client.camera import KEYS, MODES, pose_of_keys

HELD_S = 0.6
"""Longer than the delay after which terminals start to repeat a key."""


def wasd_to_camera_payload(actions: Iterable[str], mode: str = "velocity") -> dict[str, object]:
    """Camera payload of keys that are held together, for ``multi_modal_data.camera``.

    Args:
        actions: keys, of either case.
        mode: ``velocity`` repeats the step in every latent frame until replaced, ``target``
            moves there once.

    Raises:
        ValueError: unknown key or mode.
    """
    if mode not in MODES:
        raise ValueError(f"modes are {', '.join(MODES)}; got {mode!r}")
    return pose_of_keys(actions).payload(mode)


@dataclass
class HeldKeys:
    """Which keys are down, told from their repetition."""

    last_seen_s: dict[str, float] = field(default_factory=dict)

    def press(self, key: str, now_s: float) -> None:
        """A key was read; space releases all."""
        if key == " ":
            self.last_seen_s.clear()
        elif key.lower() in KEYS:
            self.last_seen_s[key.lower()] = now_s

    def held(self, now_s: float) -> frozenset[str]:
        """Keys that have repeated recently."""
        return frozenset(k for k, seen in self.last_seen_s.items() if now_s - seen < HELD_S)


@contextmanager
def typed_keys(descriptor: int) -> Iterator[asyncio.Queue[str]]:
    """Keys of a terminal without Enter and without echo; Ctrl-C keeps its meaning."""
    loop, typed = asyncio.get_running_loop(), asyncio.Queue[str]()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(
        descriptor, lambda: typed.put_nowait(os.read(descriptor, 64).decode(errors="ignore"))
    )
    try:
        yield typed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
