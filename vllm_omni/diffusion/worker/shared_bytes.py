"""Memory that a worker fills and its executor reads: pixels cross without being pickled.

The memory is a file without a name (``memfd_create``), so a generation of workers can neither
meet the memory of an earlier one nor leave it behind: the kernel frees it with its last holder,
however that ends. It has no lock; one side writes before it sends a message, the other reads
after it got it. It does not count towards the size of ``/dev/shm``.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped


class SharedBytes:
    """One end of the memory. Pickled only while a process is being started."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedBytes:
        """New empty memory; it grows with the largest array written."""
        return cls(os.memfd_create("vllm-omni-pixels"))

    @property
    def size(self) -> int:
        """Size of the memory, in bytes."""
        return os.fstat(self._descriptor).st_size

    def write(self, array: Shaped[np.ndarray, "..."]) -> None:
        """Put an array at the start, over what was there."""
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(source):
            if self.size < len(source):
                os.ftruncate(self._descriptor, len(source))
            np.frombuffer(self._mapped(len(source)), np.uint8, len(source))[:] = source

    def read(self, shape: tuple[int, ...], dtype: str) -> Shaped[np.ndarray, "..."]:
        """Copy the array at the start into memory of the caller's own."""
        array = np.empty(shape, np.dtype(dtype))
        target = array.reshape(-1).view(np.uint8)
        if len(target):
            if self.size < len(target):
                raise ValueError(f"{len(target)} bytes were announced, {self.size} are there")
            target[:] = np.frombuffer(self._mapped(len(target)), np.uint8, len(target))
        return array

    def close(self) -> None:
        """Give up this end; a second call does nothing."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (reduction.DupFd(self._descriptor),)

    def _mapped(self, needed_bytes: int) -> mmap.mmap:
        """The memory in this process's address space: a fifth of the time of file calls."""
        if self._map is None or len(self._map) < needed_bytes:
            self._map = mmap.mmap(self._descriptor, self.size)
        return self._map

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
