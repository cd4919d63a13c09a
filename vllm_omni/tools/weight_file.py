"""Writes safetensors files that whoever may read the folder may read."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, with the permissions of the umask.

    The library's own ``save_file`` makes a file that is closed to everybody else.
    """
    path.write_bytes(save(dict(weights), metadata={"format": "pt"}))
