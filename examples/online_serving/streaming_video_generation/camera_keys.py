"""Keys of a terminal, and the camera movement that they stand for."""

import asyncio
import math
import os
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STEP = 0.05
"""Travel of one held key per latent frame; the model's full speed."""
YAW_STEP, PITCH_STEP = math.radians(6), math.radians(4)
KEYS = frozenset("wasdijkl")
HELD_S = 0.6
"""Longer than the delay after which terminals start to repeat a key."""


def wasd_to_camera_payload(actions: Iterable[str], mode: str = "velocity") -> dict[str, object]:
    """Camera payload of keys that are held together, for ``multi_modal_data.camera``.

    w and s move along the heading, d and a to the right and left of it, both on the ground; l and
    j turn right and left by 6 degrees, i and k look up and down by 4. Opposite keys cancel. The
    frame is +X right, +Y down, +Z forward; the quaternion is x, y, z, w.

    Args:
        actions: keys, of either case.
        mode: ``velocity`` repeats the step in every latent frame until replaced, ``target``
            moves there once.

    Raises:
        ValueError: unknown key or mode.
    """
    held = {action.lower() for action in actions}
    if held - KEYS or mode not in {"velocity", "target"}:
        raise ValueError(
            f"keys are {' '.join(sorted(KEYS))} and modes velocity, target; got "
            f"{sorted(held - KEYS)}, {mode!r}"
        )
    yaw = YAW_STEP * (("l" in held) - ("j" in held))
    pitch = PITCH_STEP * (("i" in held) - ("k" in held))
    forward = STEP * (("w" in held) - ("s" in held))
    right = STEP * (("d" in held) - ("a" in held))
    return {
        "mode": mode,
        "data": {
            # The step follows the new heading: forward is (sin, 0, cos), right is (cos, 0, -sin).
            "translation": [
                forward * math.sin(yaw) + right * math.cos(yaw),
                0.0,
                forward * math.cos(yaw) - right * math.sin(yaw),
            ],
            # Yaw about the world's Y, then pitch about the camera's own X.
            "rotation": [
                math.cos(yaw / 2) * math.sin(pitch / 2),
                math.sin(yaw / 2) * math.cos(pitch / 2),
                -math.sin(yaw / 2) * math.sin(pitch / 2),
                math.cos(yaw / 2) * math.cos(pitch / 2),
            ],
        },
    }


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
