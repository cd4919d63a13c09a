"""The trained toy world that the package carries, and first pictures of its three scenes."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from vllm_omni.errors import ConfigError
from vllm_omni.tools.toy_world.place import LIGHTS, View, render

MODEL = Path(__file__).resolve().parents[2] / "data" / "toy_world"
"""The shipped checkpoint, in the layout of the real one."""


def write_model(directory: Path) -> None:
    """Copy the shipped checkpoint; files of its names in ``directory`` are replaced."""
    shutil.copytree(MODEL, directory, dirs_exist_ok=True)


def first_picture(scene: str, *, height: int, width: int) -> Image.Image:
    """The island as a walker at its middle sees it, at ``day``, ``dusk`` or ``night``.

    Raises:
        ConfigError: if there is no such scene.
    """
    if scene not in LIGHTS:
        raise ConfigError(f"there is no scene {scene!r}; choose one of {', '.join(LIGHTS)}")
    light = np.eye(len(LIGHTS))[LIGHTS.index(scene)]
    return Image.fromarray(render(View(0.0, 0.0, 0.0, 0.0), light, height=height, width=width))
