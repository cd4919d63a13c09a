"""Rotations as float64 matrices and quaternions, without torch.

A quaternion is an array (w, x, y, z). Matrices act on column vectors.
"""

import numpy as np
from jaxtyping import Float, Float64

_LERP_DOT = 0.9995
"""Above this cosine the arc is so short that a normalised lerp is more accurate than a slerp."""


def quaternion_of(rotation: Float[np.ndarray, "3 3"]) -> Float64[np.ndarray, "4"]:
    """Unit quaternion of a rotation matrix.

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
    """Rotation matrix of a quaternion of any length but zero."""
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
    """Normalised linear interpolation along the shorter arc."""
    if np.dot(start, end) < 0.0:
        end = -end
    blend = start + fraction * (end - start)
    return _unit(blend)


def slerp(
    start: Float64[np.ndarray, "4"], end: Float64[np.ndarray, "4"], fraction: float
) -> Float64[np.ndarray, "4"]:
    """Spherical interpolation along the shorter arc; very short arcs use :func:`nlerp`."""
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
