"""What devices have in common whose module of torch follows the interface of ``torch.cuda``."""

from types import ModuleType
from typing import Protocol, runtime_checkable

import torch

from vllm_omni.platforms.base import CompletionEvent
from vllm_omni.platforms.laps import DeviceLaps, LapClock


@runtime_checkable
class RecordedEvent(CompletionEvent, Protocol):
    """A completion event that can be waited for."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class AcceleratorPlatform:
    """Memory by a caching allocator, work in queues, timed events; a part of a ``Platform``.

    Args:
        module: ``torch.cuda`` or its sibling of another device.
    """

    pool_from_free_memory = True

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def free_bytes(self, device: torch.device) -> int:
        """Free memory of the driver, once the allocator has given back what it can.

        What it keeps, pieces between other tensors and memory of graphs, fits no new pool.
        """
        self._module.empty_cache()
        free, _ = self._module.mem_get_info(device)
        return free

    def peak_bytes(self, device: torch.device) -> int:
        """Peak of allocated bytes."""
        return self._module.max_memory_allocated(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""
        self._module.synchronize(device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy through pinned memory and wait for this copy only, not for work queued later.

        Every call takes a fresh pinned buffer: one that is used again might be written before
        an earlier copy out of it has run.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._recorded_event(tensor.device).synchronize()
        return host

    def lap_clock(self, device: torch.device) -> LapClock:
        """Timed events."""
        return DeviceLaps(self._module, device)

    def _recorded_event(self, device: torch.device) -> RecordedEvent:
        event = self._module.Event()
        event.record(self._module.current_stream(device))
        return event
