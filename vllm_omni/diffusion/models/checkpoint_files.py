"""Reads the small files of a checkpoint, and checks the large ones as far as their heads tell.

Whatever is wrong is one line that names the file as ``folder/name`` and the reason. No torch.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_omni.errors import CheckpointError
from vllm_omni.system_errors import reason, refuse_special

DIFFUSERS = "diffusion_pytorch_model"
"""Name of the weight files that diffusers writes, without what follows."""
TRANSFORMERS = "model"
"""The same of transformers."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_LENGTH_BYTES = 8
_LONGEST_HEAD = 100_000_000
"""Bytes of the head of a safetensors file; the format allows no more."""


def label(path: Path) -> str:
    """What messages call a file of a checkpoint."""
    return f"{path.parent.name}/{path.name}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report what the system says about a file as :class:`CheckpointError`."""
    try:
        refuse_special(path)
        yield
    except FileNotFoundError as error:
        raise _absence(path) from error
    except OSError as error:
        raise CheckpointError(f"{label(path)} cannot be read: {reason(error)}") from error


def read_json(path: Path) -> dict[str, object]:
    """Read one JSON object of a checkpoint.

    Raises:
        CheckpointError: if the file cannot be read or holds no JSON object.
    """
    with reading(path):
        content = path.read_bytes()
    _refuse_pointer(path, content)
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label(path)} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{label(path)} must hold a JSON object")
    return raw


def weight_files(directory: Path, stem: str) -> tuple[Path, ...]:
    """Safetensors files of a component: the ones its index names, else its single file.

    Args:
        stem: ``DIFFUSERS`` or ``TRANSFORMERS``.

    Raises:
        CheckpointError: if there are none, a named one is missing, or the index is unreadable.
    """
    index = directory / f"{stem}.safetensors.index.json"
    with reading(index):
        names = _indexed_names(index) if index.is_file() else [f"{stem}.safetensors"]
        files = tuple(directory / name for name in names)
        missing = [file for file in files if not file.exists()]
    if missing:
        raise _absence(*missing)
    return files


def check_weights(directory: Path, stem: str) -> None:
    """Refuse weight files that are missing, closed to us, pointers, cut short or something else."""
    for file in weight_files(directory, stem):
        _check_safetensors(file)


def check_readable(directory: Path) -> None:
    """Refuse a folder of small files if any is closed to us, a pointer, or JSON that is none."""
    with reading(directory):
        files = sorted(directory.iterdir())
    for file in files:
        if file.suffix == ".json":
            read_json(file)
        elif not file.is_dir():
            with reading(file), file.open("rb") as opened:
                _refuse_pointer(file, opened.read(len(_POINTER)))


def _absence(*files: Path) -> CheckpointError:
    link = ", which is a link to nothing" if files[0].is_symlink() else ""
    return CheckpointError(f"the checkpoint has no {', '.join(map(label, files))}{link}")


def _indexed_names(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{label(index)} must hold weight_map, from tensors to files")
    return sorted({str(name) for name in weight_map.values()})


def _check_safetensors(file: Path) -> None:
    """Compare the size of a file with what its head says: 8 bytes of length, JSON, then data."""
    with reading(file), file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        start = opened.read(_LENGTH_BYTES)
        _refuse_pointer(file, start + opened.peek(len(_POINTER)))
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or length > _LONGEST_HEAD or _LENGTH_BYTES + length > size:
            raise CheckpointError(
                f"{label(file)} of {size} bytes cannot be read: it is no safetensors file, or the "
                "beginning of one"
            )
        head = opened.read(length)
    wanted = _LENGTH_BYTES + length + _data_bytes(file, head)
    if size != wanted:
        raise CheckpointError(
            f"{label(file)} cannot be read: it has {size} bytes and should have {wanted}; was its "
            "download cut short?"
        )


def _data_bytes(file: Path, head: bytes) -> int:
    """How many bytes of data the head of a safetensors file announces."""
    try:
        tensors = json.loads(head)
        tensors.pop("__metadata__", None)
        return max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{label(file)} cannot be read: its head is none of a safetensors file"
        ) from error


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{label(path)} is a pointer of git-lfs instead of the file; fetch the files with "
            "`git lfs pull` in the checkpoint"
        )
