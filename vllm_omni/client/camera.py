"""Camera payloads: of keys that are held, and of a pose in numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_omni.diffusion.camera_motion import ACTION_KEYS, MOVE_STEP, PITCH_STEP_RAD, YAW_STEP_RAD

KEYS = frozenset(ACTION_KEYS)
KEY_HELP = "w a s d move, i j k l look, space stands still, q ends the world"
MODES = ("velocity", "target")


@dataclass(frozen=True, slots=True)
class Pose:
    """A movement, or a place relative to where the world began.

    Attributes:
        translation: x to the right, y down, z forward, in world units.
        rotation: quaternion x, y, z, w.
    """

    translation: tuple[float | int, float | int, float | int] = (0, 0, 0)
    rotation: tuple[float | int, float | int, float | int, float | int] = (0, 0, 0, 1)

    def payload(self, mode: str) -> dict[str, object]:
        """What ``multi_modal_data.camera`` carries for it."""
        data = {"translation": list(self.translation), "rotation": list(self.rotation)}
        return {"mode": mode, "data": data}


def pose_of_keys(keys: Iterable[str]) -> Pose:
    """Movement per latent frame of keys that are held together, of either case.

    w and s move along the heading, d and a to the right and left of it, all on the ground; l and
    j turn right and left by 6 degrees, i and k look up and down by 4. Opposite keys cancel.

    Raises:
        ValueError: unknown key.
    """
    held = {key.lower() for key in keys}
    if held - KEYS:
        raise ValueError(f"keys are {' '.join(sorted(KEYS))}; got {sorted(held - KEYS)}")
    yaw = YAW_STEP_RAD * (("l" in held) - ("j" in held))
    pitch = PITCH_STEP_RAD * (("i" in held) - ("k" in held))
    forward = MOVE_STEP * (("w" in held) - ("s" in held))
    right = MOVE_STEP * (("d" in held) - ("a" in held))
    return Pose(
        # The step follows the new heading: forward is (sin, 0, cos), right is (cos, 0, -sin).
        translation=(
            forward * math.sin(yaw) + right * math.cos(yaw),
            0.0,
            forward * math.cos(yaw) - right * math.sin(yaw),
        ),
        # Yaw about the world's Y, then pitch about the camera's own X.
        rotation=(
            math.cos(yaw / 2) * math.sin(pitch / 2),
            math.sin(yaw / 2) * math.cos(pitch / 2),
            -math.sin(yaw / 2) * math.sin(pitch / 2),
            math.cos(yaw / 2) * math.cos(pitch / 2),
        ),
    )
