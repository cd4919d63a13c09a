"""Keeps memory that a device may still touch after the host has let go of it.

Memory must not be reused while queued work of the device or a message of another rank can still
reach it. :class:`TransferOwners` keeps what an exchange touches until the device has passed it.
After a failure nobody can say when the device lets go; then :data:`QUARANTINE` keeps the memory
until the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxtyping import Shaped
from torch import Tensor

from vllm_omni.errors import OmniError
from vllm_omni.platforms.base import CompletionEvent

MOST_UNFINISHED = 32
"""More exchanges than this cannot be under way: the device makes no progress."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one failure left behind.

    Attributes:
        origin: the part that failed.
        reason: class and text of the exception.
        owners: objects that own memory; they are never released.
    """

    origin: str
    reason: str
    owners: list[object]


@dataclass(slots=True, eq=False)
class Quarantine:
    """A list of failures that only grows. It swallows no exception and ends no process."""

    held: list[Held] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """Failures whose memory is kept."""
        return len(self.held)

    def hold(self, origin: str, reason: BaseException, *owners: object) -> None:
        """Keep ``owners`` for ever, because of a failure of ``origin``."""
        with self._lock:
            self.held.append(Held(origin, f"{type(reason).__name__}: {reason}", list(owners)))

    @contextmanager
    def joined_by(self, *owners: object) -> Iterator[None]:
        """Let ``owners`` go with whatever a failure inside the block puts here.

        For callers who know of more memory than the part that fails, and not which part it is.
        """
        before = self.size
        try:
            yield
        except BaseException:
            if self.size > before:
                self.held[before].owners.extend(owners)
            raise


QUARANTINE = Quarantine()
"""The one quarantine of this process. Workers report its size."""


class StalledTransferError(OmniError):
    """Exchanges were queued but the device does not finish them."""


@dataclass(slots=True)
class TransferOwners:
    """Holds the tensors of each exchange until the device is done with them.

    Waiting for an exchange orders the device's queue, not the host, which goes on and could free
    the memory. Where exchanges end when their call returns, nothing is held.

    Attributes:
        record_event: marks the end of the work queued so far; gives ``None`` where nothing has
            to be kept beyond the call.
        quarantine: takes the tensors of exchanges that raise.
        unfinished: tensors of each exchange and the event behind it, oldest first.
    """

    record_event: Callable[[], CompletionEvent | None]
    quarantine: Quarantine = QUARANTINE
    unfinished: list[tuple[CompletionEvent, list[Shaped[Tensor, "..."]]]] = field(
        default_factory=list
    )

    @contextmanager
    def kept(self, tensors: list[Shaped[Tensor, "..."]]) -> Iterator[None]:
        """Keep ``tensors``, which the block may add to, beyond the end of the block.

        Raises:
            StalledTransferError: if too many earlier exchanges are unfinished.
        """
        self._drop_finished()
        try:
            yield
            event = self.record_event()
            if event is not None:
                self.unfinished.append((event, tensors))
        except BaseException as error:
            self.quarantine.hold("pixel exchange", error, *tensors)
            raise

    def _drop_finished(self) -> None:
        self.unfinished = [entry for entry in self.unfinished if not entry[0].query()]
        if len(self.unfinished) >= MOST_UNFINISHED:
            raise StalledTransferError(
                f"{len(self.unfinished)} pixel exchanges are queued and none is finished by the "
                "device; restart the workers"
            )
