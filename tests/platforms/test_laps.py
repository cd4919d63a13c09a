"""Times of parts of work, on the host and by events of a device."""

import time
from itertools import count
from types import ModuleType

import pytest
import torch

from vllm_omni.platforms.laps import ChunkStopwatch, DeviceLaps, LapClock

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")


def test_the_host_measures_what_lies_between_two_marks(monkeypatch):
    times_s = iter([1.0, 1.25, 1.375])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times_s))
    clock = LapClock()
    for _ in range(3):
        clock.mark()
    assert clock.laps_ms() == [250.0, 125.0]


class FakeEvent:
    """The n-th event of its queue is recorded n squared milliseconds after the start."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: "FakeStream") -> None:
        self.stream, self.at_ms = stream, float(next(stream.numbers) ** 2)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return later.at_ms - self.at_ms


class FakeStream:
    """Counts what is recorded in it."""

    def __init__(self) -> None:
        self.numbers = count(1)


def test_a_device_measures_by_events_in_its_current_queue():
    module = ModuleType("device")
    streams = {torch.device("cuda", 3): FakeStream()}
    module.Event, module.current_stream = FakeEvent, streams.__getitem__
    clock = DeviceLaps(module, torch.device("cuda", 3))
    for _ in range(4):
        clock.mark()
    assert clock.laps_ms() == [3.0, 5.0, 7.0]


def test_laps_of_a_chunk_are_told_by_part():
    clock = LapClock()
    watch = ChunkStopwatch(clock)
    for part in ("condition_ms", "probes_ms"):
        watch.lap(part)
    timings = watch.timings()
    assert [timings.condition_ms, timings.probes_ms] == clock.laps_ms()
    assert timings.decode_ms == 0.0
