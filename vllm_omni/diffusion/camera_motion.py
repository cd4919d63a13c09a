"""How a camera moves: held keys, velocities and targets, one step per latent frame. No torch.

A pose is a camera-to-world matrix, float64: +X right, +Y down, +Z forward. Scripted keys walk on
the ground, live cameras follow rigid motions; both are integrated here and nowhere else. Matrices
act on column vectors. A quaternion is an array (w, x, y, z); on the wire it is x, y, z, w.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from vllm_omni.errors import InvalidRequestError

ACTION_KEYS = "wasdijkl"
FLOAT32_STEPS = 4096
"""Distance from the origin, in steps, up to which float32 keeps motion: it rounds a coordinate by
2**-24 of it, here 2.4e-4 of a step. A path of this many frames from the origin stays within."""
MOVE_STEP = 0.05
"""World units per latent frame; also the fixed translation scale of a live camera."""
YAW_STEP_RAD = math.radians(6.0)
PITCH_STEP_RAD = math.radians(4.0)
PITCH_LIMIT_RAD = math.radians(85.0)
"""A pitch step that would pass this is dropped whole, so holding ``i`` stops at 84 degrees."""

_NORM_EPS = 1e-6
_LERP_DOT = 0.9995
"""Above this cosine the arc is so short that a normalised lerp is more accurate than a slerp."""


@dataclass(frozen=True, slots=True)
class _RigidMotion:
    """A translation and a rotation.

    Attributes:
        rotation: unit quaternion x, y, z, w.
    """

    translation: tuple[float, float, float]
    rotation: tuple[float, float, float, float]

    def matrix(self) -> Float64[np.ndarray, "4 4"]:
        """Return the motion as a matrix: the pose that it leads to from the origin."""
        return rigid(matrix_of(self._quaternion()), np.array(self.translation))

    def _quaternion(self) -> Float64[np.ndarray, "4"]:
        x, y, z, w = self.rotation
        return np.array([w, x, y, z])


@dataclass(frozen=True, slots=True)
class CameraVelocity(_RigidMotion):
    """A step in the camera's own frame that is taken at every latent frame, until replaced."""

    def step(self, pose: Float64[np.ndarray, "4 4"]) -> Float64[np.ndarray, "4 4"]:
        """Return the pose one latent frame later."""
        return pose @ self.matrix()


@dataclass(frozen=True, slots=True)
class CameraTarget(_RigidMotion):
    """A pose to reach, relative to the first pose of the session."""

    def approach(
        self, start: Float64[np.ndarray, "4 4"], fraction: float
    ) -> Float64[np.ndarray, "4 4"]:
        """Return the pose after a fraction of the way from ``start``; the end is hit exactly."""
        if fraction >= 1.0:
            return self.matrix()
        blend = nlerp(quaternion_of(start[:3, :3]), self._quaternion(), fraction)
        position = (1.0 - fraction) * start[:3, 3] + fraction * np.array(self.translation)
        return rigid(matrix_of(blend), position)


CameraMotion = CameraTarget | CameraVelocity


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


def integrate_keys(
    frames: Sequence[frozenset[str]], pose: Float64[np.ndarray, "4 4"], pitch_rad: float
) -> tuple[Float64[np.ndarray, "latent_frames 4 4"], float]:
    """Walk from ``pose`` with the keys held in each latent frame.

    ``w``/``s`` walk along the heading and ``d``/``a`` along the right vector, both flattened to
    the ground plane; ``l``/``j`` turn about the world's vertical and ``i``/``k`` pitch about the
    camera's own X. Opposite keys cancel.

    Args:
        frames: lower-case keys of each latent frame.
        pose: camera-to-world pose before the first frame.
        pitch_rad: pitch accumulated so far, which the limit applies to.

    Returns:
        The pose after each frame, and the pitch after the last.
    """
    poses = np.empty((len(frames), 4, 4))
    for index, held in enumerate(frames):
        pose, pitch_rad = _key_step(held, pose, pitch_rad)
        poses[index] = pose
    return poses, pitch_rad


def _key_step(
    held: frozenset[str], pose: Float64[np.ndarray, "4 4"], pitch_rad: float
) -> tuple[Float64[np.ndarray, "4 4"], float]:
    pitch_delta = PITCH_STEP_RAD * _axis(held, "i", "k")
    if abs(pitch_rad + pitch_delta) > PITCH_LIMIT_RAD:
        pitch_delta = 0.0
    yaw_delta = YAW_STEP_RAD * _axis(held, "l", "j")
    rotation = about_y(yaw_delta) @ pose[:3, :3] @ about_x(pitch_delta)
    movement = np.zeros(3)
    movement += MOVE_STEP * _flattened(rotation[:, 2]) * _axis(held, "w", "s")
    movement += MOVE_STEP * _flattened(rotation[:, 0]) * _axis(held, "d", "a")
    return rigid(rotation, pose[:3, 3] + movement), pitch_rad + pitch_delta


def _axis(held: frozenset[str], positive: str, negative: str) -> int:
    return int(positive in held) - int(negative in held)


def _flattened(axis: Float64[np.ndarray, "3"]) -> Float64[np.ndarray, "3"]:
    x, z = float(axis[0]), float(axis[2])
    norm = math.sqrt(x * x + z * z)  # not a BLAS dot, whose last bit depends on the processor
    flat = np.array([x, 0.0, z])
    return flat / (norm + _NORM_EPS) if norm > 0.0 else flat


def rigid(
    rotation: Float64[np.ndarray, "3 3"], translation: Float64[np.ndarray, "3"]
) -> Float64[np.ndarray, "4 4"]:
    """Put a rotation and a translation into one matrix."""
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = translation
    return matrix


def about_x(angle_rad: float) -> Float64[np.ndarray, "3 3"]:
    """Rotate about the X axis; a positive angle turns a camera's view up."""
    c, s = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def about_y(angle_rad: float) -> Float64[np.ndarray, "3 3"]:
    """Rotate about the Y axis; a positive angle turns a camera's view to the right."""
    c, s = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def quaternion_of(rotation: Float[np.ndarray, "3 3"]) -> Float64[np.ndarray, "4"]:
    """Return the unit quaternion of a rotation matrix.

    Uses the trace when it is positive, else the largest diagonal element (the first on ties), so
    the divisor is never small.
    """
    m = rotation.astype(np.float64)
    trace = m[0, 0] + m[1, 1] + m[2, 2]
    if trace > 0.0:
        s = np.sqrt(trace + 1.0) * 2.0
        vector = (m[2, 1] - m[1, 2]) / s, (m[0, 2] - m[2, 0]) / s, (m[1, 0] - m[0, 1]) / s
        return _unit(np.array([0.25 * s, *vector]))
    i = int(np.argmax(np.diagonal(m)))
    j, k = (i + 1) % 3, (i + 2) % 3
    s = np.sqrt(1.0 + m[i, i] - m[j, j] - m[k, k]) * 2.0
    quaternion = np.empty(4)
    quaternion[0] = (m[k, j] - m[j, k]) / s
    quaternion[1 + i] = 0.25 * s
    quaternion[1 + j] = (m[i, j] + m[j, i]) / s
    quaternion[1 + k] = (m[i, k] + m[k, i]) / s
    return _unit(quaternion)


def matrix_of(quaternion: Float64[np.ndarray, "4"]) -> Float64[np.ndarray, "3 3"]:
    """Return the rotation matrix of a quaternion of any length but zero."""
    w, x, y, z = _unit(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def nlerp(
    start: Float64[np.ndarray, "4"], end: Float64[np.ndarray, "4"], fraction: float
) -> Float64[np.ndarray, "4"]:
    """Interpolate linearly along the shorter arc and normalise."""
    if np.dot(start, end) < 0.0:
        end = -end
    blend = start + fraction * (end - start)
    return _unit(blend)


def slerp(
    start: Float64[np.ndarray, "4"], end: Float64[np.ndarray, "4"], fraction: float
) -> Float64[np.ndarray, "4"]:
    """Interpolate spherically along the shorter arc; very short arcs use :func:`nlerp`."""
    dot = float(np.dot(start, end))
    if dot < 0.0:
        end, dot = -end, -dot
    if dot > _LERP_DOT:
        return nlerp(start, end, fraction)
    angle = np.arccos(min(dot, 1.0))
    weights = np.sin((1.0 - fraction) * angle), np.sin(fraction * angle)
    blend = (weights[0] * start + weights[1] * end) / np.sin(angle)
    return _unit(blend)


def _unit(quaternion: Float64[np.ndarray, "4"]) -> Float64[np.ndarray, "4"]:
    return quaternion / np.linalg.norm(quaternion)


def float32_keeps_motion(poses: Float[np.ndarray, "frames 4 4"], step: float | None = None) -> bool:
    """Tell whether float32 arithmetic keeps the motion of a path.

    Positions that come as float32 have lost no more than they had, unless the camera stands still:
    then the noise of rounding would be scaled up to a full step.

    Args:
        poses: camera-to-world matrices.
        step: what translations are divided by; ``None`` for the longest step of the path.
    """
    positions = poses[:, :3, 3].astype(np.float64)
    if step is None:
        step = float(np.linalg.norm(np.diff(positions, axis=0), axis=1).max(initial=0.0))
    if poses.dtype == np.float32 and step > 0.0:
        return True
    return bool(np.abs(positions).max() <= FLOAT32_STEPS * step)


def moved_to_first(poses: Float[np.ndarray, "frames 4 4"]) -> Float64[np.ndarray, "frames 4 4"]:
    """Shift a path so that its first camera is at the origin, in float64; its motion stays."""
    moved = poses.astype(np.float64)
    moved[:, :3, 3] -= moved[0, :3, 3]
    return moved
