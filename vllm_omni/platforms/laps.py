"""Measures how long the parts of a chunk take, on the host or in a device's queue of work."""

import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
from typing_extensions import override

from vllm_omni.diffusion.messages import ChunkTimings


class LapClock:
    """Takes marks in the order of the work, which is done when its call returns."""

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        """Mark the end of the work so far."""
        self._marks_s.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        """Return the milliseconds from each mark to the next.

        Call only after the device has finished all marked work; nothing here waits for it.
        """
        return [(after - before) * 1000.0 for before, after in pairwise(self._marks_s)]


class DeviceLaps(LapClock):
    """A clock of timed events in the device's current queue, which neither stop it nor the host.

    Args:
        module: ``torch.cuda`` or its sibling of another device.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._events: list[torch.Event] = []

    @override
    def mark(self) -> None:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        self._events.append(event)

    @override
    def laps_ms(self) -> list[float]:
        return [before.elapsed_time(after) for before, after in pairwise(self._events)]


class ChunkStopwatch:
    """Measures the laps of one chunk.

    Args:
        wait: called at the end of every lap, so that the work of one lap does not run beside that
            of the next; ``None`` lets the device work on.
    """

    def __init__(self, clock: LapClock, wait: Callable[[], object] | None = None) -> None:
        self._clock = clock
        self._wait = wait
        self._names: list[str] = []
        self._clock.mark()

    def lap(self, name: str) -> None:
        """End a lap and begin the next; ``name`` is a field of :class:`ChunkTimings`."""
        if self._wait is not None:
            self._wait()
        self._clock.mark()
        self._names.append(name)

    def timings(self) -> ChunkTimings:
        """Return all laps so far. Call only after the device has finished their work."""
        return ChunkTimings(**dict(zip(self._names, self._clock.laps_ms(), strict=True)))
