"""What the demo begins with: the trained checkpoint, three scenes, a recorded camera. No torch."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from PIL import Image

from vllm_omni.diffusion.camera_motion import about_y
from vllm_omni.diffusion.utils.island import LIGHTS, View, render
from vllm_omni.errors import ConfigError

MODEL = Path(__file__).resolve().parents[2] / "data" / "toy_world"
"""The shipped checkpoint, in the layout of the real one."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a world begins, what its prompt says, and a walk that shows the place.

    Attributes:
        keys: eight chunks of held keys, as :func:`vllm_omni.tools.toy_world.walks.script` reads
            them; nothing solid stops this walk.
    """

    view: View
    prompt: str
    keys: str


SCENES = {
    "day": Scene(View(2.0, -3.0, math.radians(-10)), "The island at noon.", "w6 j6 w6 l6"),
    "dusk": Scene(View(-0.5, -3.6, math.radians(25)), "The island at dusk.", "w6 j3 -2 l6 wl4 w3"),
    "night": Scene(View(0.3, 3.6, math.radians(215)), "The island at night.", "w6 l6 w4 j6 -2"),
}
"""Scenes by the light of the island that they show."""


def write_model(directory: Path) -> None:
    """Copy the shipped checkpoint; files of its names in ``directory`` are replaced."""
    shutil.copytree(MODEL, directory, dirs_exist_ok=True)


def scene_of(name: str) -> Scene:
    """Look up a scene of :data:`SCENES`; raises ConfigError if there is no such scene."""
    if name not in SCENES:
        raise ConfigError(f"there is no scene {name!r}; choose one of {', '.join(SCENES)}")
    return SCENES[name]


def first_picture(name: str, *, height: int, width: int) -> Image.Image:
    """Paint what a walker sees where a scene begins, as an RGB picture of any size.

    Raises:
        ConfigError: if there is no such scene, or for an empty size.
    """
    scene = scene_of(name)
    if height < 1 or width < 1:
        raise ConfigError(f"a picture needs positive sides, got {width}x{height}")
    light = np.eye(len(LIGHTS))[LIGHTS.index(name)]
    return Image.fromarray(render(scene.view, light, height=height, width=width))


INTRINSICS = (500.0, 500.0, 416.0, 240.0)
"""fx, fy, cx, cy of a moderate wide angle, at 832x480 reference pixels."""
_SWING_RAD = 0.35
"""Largest angle between the view and the direction of travel."""


def gliding_path(pixel_frames: int) -> Float32[np.ndarray, "n 4 4"]:
    """A walk forward that looks slowly to the right, to the left and ahead again.

    Returns:
        A camera-to-world matrix for each pixel frame; x points right, y down, z into the picture.
        The first is the identity. Speed starts and ends at zero, as that of a hand-held camera.
    """
    poses = np.tile(np.eye(4), (pixel_frames, 1, 1))
    for index in range(pixel_frames):
        share = index / max(pixel_frames - 1, 1)
        yaw = _SWING_RAD * math.sin(2 * math.pi * share) * math.sin(math.pi * share)
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
