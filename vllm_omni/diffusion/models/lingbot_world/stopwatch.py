"""Times the parts of one chunk."""

import time
from dataclasses import replace

import torch

from vllm_omni.diffusion.messages import ChunkTimings
from vllm_omni.platforms import Platform


class ChunkStopwatch:
    """Laps of one chunk in milliseconds.

    Host time is what is measured. On a device that queues work, a lap says how long the host
    was busy unless ``synchronize`` is set, which the benchmark does and serving does not.
    """

    synchronize = False

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform = platform
        self._device = device
        self._timings = ChunkTimings()
        self._started = time.perf_counter()

    def lap(self, part: str) -> None:
        """End a lap and begin the next; ``part`` is a field of :class:`ChunkTimings`."""
        if self.synchronize:
            self._platform.synchronize(self._device)
        now = time.perf_counter()
        self._timings = replace(self._timings, **{part: (now - self._started) * 1000.0})
        self._started = now

    def timings(self) -> ChunkTimings:
        """All laps so far."""
        return self._timings
