"""Keeps memory that a device still works on after the host has gone on.

Waiting for an exchange orders a device's queue, not the host: the memory that the exchange and
the work after it touch must not be reused before the device has passed an event behind them.
Where exchanges end when their call returns, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxtyping import Shaped
from torch import Tensor

from vllm_omni.errors import OmniError
from vllm_omni.platforms.base import CompletionEvent

MOST_UNFINISHED = 32
"""More chunks than this cannot be under way: the device makes no progress."""


class StalledTransferError(OmniError):
    """Exchanges were queued but the device does not finish them."""


@dataclass(slots=True)
class TransferOwners:
    """Holds tensors until the device is done with them.

    Attributes:
        record_event: marks the end of the work queued so far; gives ``None`` where nothing has
            to be kept beyond the call.
        unfinished: tensors of each exchange and the event behind it, oldest first.
        failed: tensors of exchanges that raised, for ever: nobody can say when the device and
            the peers let go of them. The process is to be restarted.
    """

    record_event: Callable[[], CompletionEvent | None]
    unfinished: list[tuple[CompletionEvent, list[Shaped[Tensor, "..."]]]] = field(
        default_factory=list
    )
    failed: list[list[Shaped[Tensor, "..."]]] = field(default_factory=list)

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
        except BaseException:
            self.failed.append(tensors)
            raise

    def _drop_finished(self) -> None:
        self.unfinished = [entry for entry in self.unfinished if not entry[0].query()]
        if len(self.unfinished) >= MOST_UNFINISHED:
            raise StalledTransferError(
                f"{len(self.unfinished)} pixel exchanges are queued and none is finished by the "
                "device; restart the workers"
            )
