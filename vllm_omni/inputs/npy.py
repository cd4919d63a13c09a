"""NPY files of untrusted origin: header and size are checked before anything is allocated."""

import ast
import math
import os
import re
from io import BufferedReader
from typing import Annotated

import numpy as np
from jaxtyping import Shaped
from pydantic import Field, ValidationError

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import Checked

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
