"""Held keys integrated into camera-to-world poses, one step per latent frame, without torch.

Camera frame: +X right, +Y down, +Z forward. ``w``/``s`` walk along the heading and ``d``/``a``
along the right vector, both flattened to the ground plane; ``l``/``j`` turn about the world's
vertical and ``i``/``k`` pitch about the camera's own X. Opposite keys cancel.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float32, Float64

from vllm_omni.errors import InvalidRequestError

ACTION_KEYS = "wasdijkl"
MOVE_STEP = 0.05
"""World units per latent frame; also the fixed translation scale of a live camera."""
YAW_STEP_RAD = math.radians(6.0)
PITCH_STEP_RAD = math.radians(4.0)
PITCH_LIMIT_RAD = math.radians(85.0)
"""A pitch step that would pass this is dropped whole, so holding ``i`` stops at 84 degrees."""
REFERENCE_WIDTH = 832
REFERENCE_HEIGHT = 480
"""Intrinsics are given for pictures of this size."""
FOCAL_PIXELS = 500.0
"""Focal length of keys and live cameras, at the size of the rollout."""

_NORM_EPS = 1e-6


def normalise_keys(keys: Iterable[str]) -> frozenset[str]:
    """Lower-case a set of held keys.

    Raises:
        InvalidRequestError: if a key is not one of ``w a s d i j k l``.
    """
    held = frozenset(key.lower() for key in keys)
    unknown = sorted(key for key in held if len(key) != 1 or key not in ACTION_KEYS)
    if unknown:
        raise InvalidRequestError(
            f"unknown camera key {unknown[0]!r}; keys are {' '.join(ACTION_KEYS)}"
        )
    return held


def reference_intrinsics(*, width: int, height: int) -> Float32[np.ndarray, "4"]:
    """Intrinsics (at reference size) that give ``FOCAL_PIXELS`` and a centred principal point."""
    return np.array(
        [
            FOCAL_PIXELS * REFERENCE_WIDTH / width,
            FOCAL_PIXELS * REFERENCE_HEIGHT / height,
            REFERENCE_WIDTH / 2,
            REFERENCE_HEIGHT / 2,
        ],
        dtype=np.float32,
    )


def integrate_camera_actions(
    frames: Sequence[frozenset[str]], pose: Float64[np.ndarray, "4 4"], pitch_rad: float
) -> tuple[Float64[np.ndarray, "latent_frames 4 4"], float]:
    """Walk from ``pose`` with the keys held in each latent frame.

    Args:
        frames: lower-case keys of each latent frame.
        pose: camera-to-world pose before the first frame.
        pitch_rad: pitch accumulated so far, which the limit applies to.

    Returns:
        The pose after each frame, and the pitch after the last.
    """
    poses = np.empty((len(frames), 4, 4))
    for index, held in enumerate(frames):
        pose, pitch_rad = _step(held, pose, pitch_rad)
        poses[index] = pose
    return poses, pitch_rad


def _step(
    held: frozenset[str], pose: Float64[np.ndarray, "4 4"], pitch_rad: float
) -> tuple[Float64[np.ndarray, "4 4"], float]:
    pitch_delta = PITCH_STEP_RAD * _axis(held, "i", "k")
    if abs(pitch_rad + pitch_delta) > PITCH_LIMIT_RAD:
        pitch_delta = 0.0
    yaw_delta = YAW_STEP_RAD * _axis(held, "l", "j")
    rotation = _about_y(yaw_delta) @ pose[:3, :3] @ _about_x(pitch_delta)
    movement = np.zeros(3)
    movement += MOVE_STEP * _flattened(rotation[:, 2]) * _axis(held, "w", "s")
    movement += MOVE_STEP * _flattened(rotation[:, 0]) * _axis(held, "d", "a")
    moved = np.eye(4)
    moved[:3, :3] = rotation
    moved[:3, 3] = pose[:3, 3] + movement
    return moved, pitch_rad + pitch_delta


def _axis(held: frozenset[str], positive: str, negative: str) -> int:
    return int(positive in held) - int(negative in held)


def _flattened(axis: Float64[np.ndarray, "3"]) -> Float64[np.ndarray, "3"]:
    x, z = float(axis[0]), float(axis[2])
    norm = math.sqrt(x * x + z * z)  # not a BLAS dot, whose last bit depends on the processor
    flat = np.array([x, 0.0, z])
    return flat / (norm + _NORM_EPS) if norm > 0.0 else flat


def _about_x(angle_rad: float) -> Float64[np.ndarray, "3 3"]:
    c, s = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def _about_y(angle_rad: float) -> Float64[np.ndarray, "3 3"]:
    c, s = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
