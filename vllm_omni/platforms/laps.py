"""Times the parts of work where it runs: on the host, or in a device's queue."""

import time
from itertools import pairwise
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class LapClock(Protocol):
    """Marks in the order of the work, and the time between them."""

    def mark(self) -> None:
        """Mark the end of the work so far."""
        ...

    def laps_ms(self) -> list[float]:
        """Milliseconds from each mark to the next.

        Only once the device has done all marked work: nothing here waits for it.
        """
        ...


class HostLaps:
    """Work of a host is done when it returns."""

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        """See :class:`LapClock`."""
        self._marks_s.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        """See :class:`LapClock`."""
        return [(after - before) * 1000.0 for before, after in pairwise(self._marks_s)]


class DeviceLaps:
    """Timed events in the device's current queue, which hold up neither it nor the host.

    Args:
        module: ``torch.cuda`` or its sibling of another device.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._events: list[torch.Event] = []

    def mark(self) -> None:
        """See :class:`LapClock`."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        self._events.append(event)

    def laps_ms(self) -> list[float]:
        """See :class:`LapClock`."""
        return [before.elapsed_time(after) for before, after in pairwise(self._events)]
