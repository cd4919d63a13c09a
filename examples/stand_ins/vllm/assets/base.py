"""A named picture as a file."""

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_omni.diffusion.utils.scenes import SCENES, first_picture

_HEIGHT, _WIDTH = 480, 832
_folder = TemporaryDirectory()


def get_vllm_public_assets(filename: str, s3_prefix: str | None = None) -> Path:  # noqa: ARG001
    """Paint a scene under this name, the same one each time; it is gone when the program ends."""
    path = Path(_folder.name) / Path(filename).name
    scene = sorted(SCENES)[zlib.crc32(path.stem.encode()) % len(SCENES)]
    first_picture(scene, height=_HEIGHT, width=_WIDTH).save(path)
    return path
