"""Memory that a worker fills and its executor reads: pixels cross without being pickled.

The memory is a file without a name (``memfd_create``), so a generation of workers can neither
meet the memory of an earlier one nor leave it behind: the kernel frees it with its last holder,
however that ends. It does not count towards the size of ``/dev/shm``.

The file is sparse: a page of marks, one byte a slot, then the slots, far apart. It has no lock: the
worker marks a slot, fills it and sends a message; who got that message reads the slot where it
lies, and takes the mark away with the last array over it.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped, UInt8

SLOTS = 4
"""Arrays that may lie in the memory at once; of more, the reader makes copies."""
_STRIDE = 1 << 32
_FREE = b"\0"


class SharedBytes:
    """One end of the memory. Pickled only while a process is being started."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._maps: dict[int, mmap.mmap] = {}
        self._marks = mmap.mmap(fd, SLOTS)

    @classmethod
    def create(cls) -> SharedBytes:
        """New empty memory; a slot takes as many bytes as the largest array written to it."""
        fd = os.memfd_create("vllm-omni-pixels")
        os.ftruncate(fd, (1 + SLOTS) * _STRIDE)
        return cls(fd)

    def write(self, array: Shaped[np.ndarray, "..."]) -> int:
        """Put an array into a slot that nobody reads, and return the slot."""
        slot = self._marks.find(_FREE, 0, SLOTS)
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes(slot, len(source))[:] = source
        self._marks[slot] = 1
        return slot

    def read(self, slot: int, shape: tuple[int, ...], dtype: str) -> Shaped[np.ndarray, "..."]:
        """Return the array in a slot; the slot is free again when nobody holds the array.

        The last free slot is the writer's: an array in it is copied.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        data = self._bytes(slot, size)
        if self._marks.find(_FREE, 0, SLOTS) < 0:
            data = data.copy()
            self._marks[slot] = 0
        else:
            weakref.finalize(data, self._marks.__setitem__, slot, 0).atexit = False
        return data.view(dtype).reshape(shape)

    def close(self) -> None:
        """Give up this end; arrays that were read stay valid. A second call does nothing."""
        self._maps.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (reduction.DupFd(self._descriptor),)

    def _bytes(self, slot: int, size: int) -> UInt8[np.ndarray, " size"]:
        """View the first bytes of a slot. Maps are kept: a page costs its fault only once."""
        if size > _STRIDE:
            raise ValueError(f"a slot holds {_STRIDE} bytes, got {size}")
        if slot not in self._maps or len(self._maps[slot]) < size:
            length = max(size, mmap.PAGESIZE)
            self._maps[slot] = mmap.mmap(self._descriptor, length, offset=(1 + slot) * _STRIDE)
        return np.frombuffer(self._maps[slot], np.uint8, size)

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the shared memory was closed")
        return self._fd


@runtime_checkable
class _SentDescriptor(Protocol):
    def detach(self) -> int: ...


def _received(sent: _SentDescriptor) -> SharedBytes:
    return SharedBytes(sent.detach())
