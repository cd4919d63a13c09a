"""Writes a complete checkpoint in the real layout, 5.8 MB, with reproducible random weights.

The files are the same to the last byte on every x86-64 machine, so that tests, the demo and
benchmarks all speak of one model. Random weights paint noise: it is for development only.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vllm_omni.errors import ConfigError
from vllm_omni.tools import tiny_recipe

TEMPLATE_DIR = Path(__file__).resolve().parents[1] / "data" / "tiny_checkpoint"


@dataclass(frozen=True, slots=True)
class _Component:
    """One set of weights: where they go and how they are drawn."""

    directory: str
    filename: str
    seed: int
    shapes: Callable[[tiny_recipe.Config], tiny_recipe.Shapes]
    scale: Callable[[str, Any], Any]


_DIFFUSERS = "diffusion_pytorch_model.safetensors"
_COMPONENTS = (
    _Component("transformer", _DIFFUSERS, 1234,
               tiny_recipe.transformer_shapes, tiny_recipe.scale_transformer),
    _Component("vae", _DIFFUSERS, 4321, tiny_recipe.vae_shapes, tiny_recipe.scale_vae),
    _Component("text_encoder", "model.safetensors", 2468,
               tiny_recipe.text_encoder_shapes, tiny_recipe.scale_text_encoder),
)  # fmt: skip


def write_tiny_checkpoint(directory: Path, *, force: bool = False) -> Path:
    """Write the checkpoint; the directory appears complete or not at all.

    Args:
        directory: created, with its parents; may exist if it is empty.
        force: replace an earlier tiny checkpoint that stands there.

    Returns:
        ``directory``.

    Raises:
        ConfigError: if something else is in the way, or its parent cannot be made.
    """
    _check_target(directory, force=force)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {directory.parent}: {error.strerror}; name another directory"
        ) from error
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _write_files(fresh)
        if directory.exists():
            directory.rename(Path(scratch) / "old")  # deleted with the scratch directory
        fresh.rename(directory)
    return directory


def is_tiny_checkpoint(directory: Path) -> bool:
    """Whether a directory holds this checkpoint and nothing else, with these very bytes."""
    present = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    if present != list(checkpoint_files()):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        _write_files(Path(scratch))
        return all(
            (directory / name).read_bytes() == (Path(scratch) / name).read_bytes()
            for name in present
        )


def checkpoint_files() -> tuple[str, ...]:
    """Relative paths of all files that :func:`write_tiny_checkpoint` writes, sorted."""
    weights = [f"{component.directory}/{component.filename}" for component in _COMPONENTS]
    return tuple(sorted([*_template_files(), *weights]))


def _template_files() -> list[str]:
    return [path.relative_to(TEMPLATE_DIR).as_posix() for path in TEMPLATE_DIR.rglob("*.json")]


def _check_target(directory: Path, *, force: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name another one")
    present = [path for path in directory.rglob("*") if not path.is_dir()]
    if present and not force:
        raise ConfigError(f"{directory} is not empty; name another directory or pass --force")
    known = set(checkpoint_files())
    foreign = [path for path in present if path.relative_to(directory).as_posix() not in known]
    if foreign:
        raise ConfigError(
            f"{directory} holds {foreign[0].name}, which no tiny checkpoint has; --force replaces "
            "only an earlier tiny checkpoint, so name another directory"
        )


def _write_files(directory: Path) -> None:
    for name in _template_files():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TEMPLATE_DIR / name, target)
    for component in _COMPONENTS:
        config = json.loads((directory / component.directory / "config.json").read_text())
        weights = tiny_recipe.draw(
            component.shapes(config), seed=component.seed, scale=component.scale
        )
        path = directory / component.directory / component.filename
        write_weights(path, weights)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, with the permissions of the umask.

    The library's own ``save_file`` makes a file that is closed to everybody else.
    """
    path.write_bytes(save(dict(weights), metadata={"format": "pt"}))
