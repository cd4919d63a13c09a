"""Makes and stores recorded camera paths: ``poses.npy`` and ``intrinsics.npy``."""

import math
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from vllm_omni.diffusion.camera_motion import about_y

INTRINSICS = (500.0, 500.0, 416.0, 240.0)
"""fx, fy, cx, cy of a moderate wide angle, at 832x480 reference pixels."""


def gliding_path(pixel_frames: int, *, swing_radians: float = 0.35) -> Float32[np.ndarray, "n 4 4"]:
    """A walk forward that looks slowly to the right, to the left and ahead again.

    Args:
        pixel_frames: one pose for each.
        swing_radians: largest angle between the view and the direction of travel.

    Returns:
        Camera-to-world matrices; x points right, y down, z into the picture. The first is the
        identity. Speed starts and ends at zero, as that of a hand-held camera.
    """
    poses = np.tile(np.eye(4), (pixel_frames, 1, 1))
    for index in range(pixel_frames):
        share = index / max(pixel_frames - 1, 1)
        yaw = swing_radians * math.sin(2 * math.pi * share) * math.sin(math.pi * share)
        poses[index, :3, :3] = about_y(yaw)
        eased = share * share * (3 - 2 * share)
        poses[index, :3, 3] = [0.3 * math.sin(math.pi * eased), 0, 4 * eased]
    return poses.astype(np.float32)


def write_camera_path(directory: Path, poses: Float32[np.ndarray, "n 4 4"]) -> None:
    """Store a path as the two files that ``action_path`` names by their directory."""
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "poses.npy", poses)
    np.save(
        directory / "intrinsics.npy", np.tile(np.array(INTRINSICS, np.float32), (len(poses), 1))
    )
