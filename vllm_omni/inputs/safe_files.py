"""Files named by a client, opened so that links, pipes and swaps cannot lead elsewhere.

The header and the size of an NPY file are checked before anything is allocated.

Error texts, which clients see, name the kind of problem and never a path of this machine. The path
is in a note on the exception, which Python shows below it in a traceback and nobody sends.
"""

import ast
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Annotated

import numpy as np
from jaxtyping import Shaped
from pydantic import Field, ValidationError

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import Checked

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a pipe would wait for a writer."""


@contextmanager
def open_regular_file(path: str, *, field: str) -> Iterator[BufferedReader]:
    """Open a file wherever it is; links are followed, anything but a regular file is refused.

    Raises:
        InvalidRequestError: without the path in its text, but in a note. So is one that is raised
            while the file is open.
    """
    with (
        _noted(lambda: f"the file is {os.path.abspath(path)!r}"),
        _descriptor(path, _OPEN, field=field, what="file") as descriptor,
    ):
        _check_kind(os.fstat(descriptor), field=field, what="file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file


@contextmanager
def open_directory_below(root: str, relative: str, *, field: str) -> Iterator[int]:
    """Open a directory under a trusted root, one component at a time.

    The root itself may be reached through links: the operator chose it. Below it nothing may be
    a link, and each directory must still be the one that was looked at once it is open.

    Args:
        relative: path below the root, or an absolute path that starts with the root.

    Yields:
        A descriptor to open files by.

    Raises:
        InvalidRequestError: if the path leaves the root, passes a link or is no directory, with
            the root in a note. So is one that is raised while the directory is open.
    """
    flags = _OPEN | os.O_DIRECTORY
    with (
        _noted(lambda: f"{relative!r:.200} was looked up below the trusted root {root!r}"),
        _descriptor(root, flags, field=field, what="trusted root") as opened_root,
    ):
        parts = _components_below(root, relative, field=field)
        descriptor = os.dup(opened_root)
        try:
            for index, part in enumerate(parts):
                what = f"directory {os.sep.join(parts[: index + 1])!r:.100}"
                below = _open_same(part, descriptor, flags, field=field, what=what)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def open_file_in(directory: int, name: str, *, field: str) -> Iterator[BufferedReader]:
    """Open a regular file of a directory descriptor; a link is refused.

    Raises:
        InvalidRequestError: if there is no such file, or it is a link, pipe or device.
    """
    descriptor = _open_same(name, directory, _OPEN, field=field, what=name)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _components_below(root: str, relative: str, *, field: str) -> list[str]:
    if not relative.strip():
        raise InvalidRequestError("must name a directory, got a blank path", field=field)
    if "\0" in relative:
        raise InvalidRequestError("must not contain a NUL character", field=field)
    if relative.startswith("~"):
        raise InvalidRequestError(
            "home directories are not expanded; give a path below the trusted root", field=field
        )
    path = os.path.normpath(relative)
    if os.path.isabs(path):
        bases = (os.path.abspath(root), os.path.realpath(root))
        inside = [base for base in bases if os.path.commonpath([base, path]) == base]
        path = os.path.relpath(path, inside[0]) if inside else os.pardir
    parts = [] if path == os.curdir else path.split(os.sep)
    if os.pardir in parts:
        raise InvalidRequestError("leaves the trusted root", field=field)
    return parts


def _open_same(name: str, directory: int, flags: int, *, field: str, what: str) -> int:
    """Open an entry of a directory and check that it is the entry that was looked at."""
    try:
        before = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (OSError, ValueError) as error:
        raise _unreadable(error, field=field, what=what) from None
    _check_kind(before, field=field, what=what, directory=bool(flags & os.O_DIRECTORY))
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        raise _unreadable(error, field=field, what=what) from None
    after = os.fstat(descriptor)
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        os.close(descriptor)
        raise InvalidRequestError(f"{what}: was replaced while being opened", field=field)
    return descriptor


def _check_kind(status: os.stat_result, *, field: str, what: str, directory: bool = False) -> None:
    wanted = stat.S_ISDIR if directory else stat.S_ISREG
    if stat.S_ISLNK(status.st_mode):
        raise InvalidRequestError(f"{what}: symbolic links are not followed", field=field)
    if not wanted(status.st_mode):
        kind = "directory" if directory else "regular file"
        raise InvalidRequestError(f"{what}: is not a {kind}", field=field)


@contextmanager
def _noted(note: Callable[[], str]) -> Iterator[None]:
    """Add a line to what is refused: shown where Python shows the error, in no text of it."""
    try:
        yield
    except InvalidRequestError as error:
        error.add_note(note())
        raise


@contextmanager
def _descriptor(path: str, flags: int, *, field: str, what: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise _unreadable(error, field=field, what=what) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unreadable(error: OSError | ValueError, *, field: str, what: str) -> InvalidRequestError:
    number = error.errno if isinstance(error, OSError) else None
    reason = "the name is not usable" if number is None else os.strerror(number)
    return InvalidRequestError(f"{what}: cannot be opened ({reason})", field=field)


_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
_HEADER_LIMIT_BYTES = 4096
_NUMERIC = re.compile(r"[<>|=](f[248]|[iu][1248])")
"""Types of at most eight bytes that hold plain numbers: no objects, records or strings."""


class _Header(Checked):
    descr: object
    fortran_order: bool
    shape: tuple[Annotated[int, Field(ge=0)], ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(str(self.descr))

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy(
    file: BufferedReader, *, row_shape: tuple[int, ...], max_rows: int, field: str
) -> Shaped[np.ndarray, "rows ..."]:
    """Read an array ``[rows, *row_shape]`` of numbers, checked before memory is taken for it.

    Args:
        file: at its start.
        row_shape: what must follow the row count in the array's shape.
        max_rows: refused above; at least one row is needed.
        field: name of the file in error texts.

    Raises:
        InvalidRequestError: if the file is not such an array, or not complete.
    """
    header = _read_header(file, field)
    rows = header.shape[0] if header.shape else 0
    if header.shape[1:] != row_shape or len(header.shape) != len(row_shape) + 1:
        needed = ", ".join(map(str, row_shape))
        raise InvalidRequestError(
            f"needs shape [frames, {needed}], got {list(header.shape)}", field=field
        )
    if not 1 <= rows <= max_rows:
        raise InvalidRequestError(f"needs 1 to {max_rows} frames, got {rows}", field=field)
    got_bytes = os.fstat(file.fileno()).st_size - file.tell()
    if got_bytes != header.data_bytes:
        raise InvalidRequestError(
            f"holds {got_bytes} bytes of data, shape {list(header.shape)} of "
            f"{header.dtype.name} needs {header.data_bytes}",
            field=field,
        )
    data = file.read(header.data_bytes)
    if len(data) != header.data_bytes:
        raise InvalidRequestError("was cut short while being read", field=field)
    order = "F" if header.fortran_order else "C"
    return np.frombuffer(data, header.dtype).reshape(header.shape, order=order)


def _read_header(file: BufferedReader, field: str) -> _Header:
    start = file.read(len(_MAGIC) + 2)
    if len(start) != len(_MAGIC) + 2 or not start.startswith(_MAGIC):
        raise InvalidRequestError("is not an NPY file", field=field)
    version = (start[-2], start[-1])
    if version not in _LENGTH_BYTES:
        raise InvalidRequestError(
            f"has NPY version {version[0]}.{version[1]}; 1.0 and 2.0 are read", field=field
        )
    length = int.from_bytes(file.read(_LENGTH_BYTES[version]), "little")
    if not 0 < length <= _HEADER_LIMIT_BYTES:
        raise InvalidRequestError(
            f"has an NPY header of {length} bytes; at most {_HEADER_LIMIT_BYTES} are read",
            field=field,
        )
    text = file.read(length)
    if len(text) != length:
        raise InvalidRequestError("ends inside its NPY header", field=field)
    return _parse_header(text, field)


def _parse_header(text: bytes, field: str) -> _Header:
    try:
        values = ast.literal_eval(text.decode("latin1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise InvalidRequestError("has an unreadable NPY header", field=field) from None
    try:
        header = _Header.model_validate(values)
    except ValidationError:
        raise InvalidRequestError("has an incomplete NPY header", field=field) from None
    if not isinstance(header.descr, str) or not _NUMERIC.fullmatch(header.descr):
        raise InvalidRequestError(
            f"needs plain numbers of at most 8 bytes (f, i or u), got type {header.descr!r:.60}",
            field=field,
        )
    return header
