"""Times the parts of one chunk."""

import torch

from vllm_omni.diffusion.messages import ChunkTimings
from vllm_omni.platforms import Platform
from vllm_omni.platforms.laps import LapClock


class ChunkStopwatch:
    """Laps of one chunk by a clock of the device's queue, or of the host.

    ``synchronize`` also makes every lap wait for the device, so that one part's work does not run
    beside the next one's; the benchmark sets it and serving does not.
    """

    synchronize = False

    def __init__(self, platform: Platform, device: torch.device, clock: LapClock) -> None:
        self._platform = platform
        self._device = device
        self._clock = clock
        self._parts: list[str] = []
        self._clock.mark()

    def lap(self, part: str) -> None:
        """End a lap and begin the next; ``part`` is a field of :class:`ChunkTimings`."""
        if self.synchronize:
            self._platform.synchronize(self._device)
        self._clock.mark()
        self._parts.append(part)

    def timings(self) -> ChunkTimings:
        """All laps so far; only once the device has done their work."""
        return ChunkTimings(**dict(zip(self._parts, self._clock.laps_ms(), strict=True)))
