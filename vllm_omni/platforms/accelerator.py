"""The part of a platform that GPUs and NPUs have in common."""

from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import override

from vllm_omni.platforms.base import CompletionEvent, Platform
from vllm_omni.platforms.laps import DeviceLaps, LapClock


@runtime_checkable
class RecordedEvent(CompletionEvent, Protocol):
    """A completion event that the host can wait for."""

    def synchronize(self) -> None:
        """Wait until the device has passed the event."""
        ...


class AcceleratorPlatform(Platform):
    """A platform with a caching allocator, queues of work and timed events.

    Args:
        module: ``torch.cuda``, or the module of another device with the same interface.
    """

    pool_from_free_memory = True

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    @override
    def free_bytes(self, device: torch.device) -> int:
        """Ask the driver, after the allocator has given back what it can.

        What the allocator keeps (pieces between other tensors, memory of graphs) is of no use to a
        new pool.
        """
        self._module.empty_cache()
        free, _ = self._module.mem_get_info(device)
        return free

    @override
    def peak_bytes(self, device: torch.device) -> int:
        return self._module.max_memory_allocated(device)

    @override
    def synchronize(self, device: torch.device) -> None:
        self._module.synchronize(device)

    @override
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host through pinned memory.

        Every call takes a new pinned buffer, since one that is used again might be written before
        an earlier copy out of it has run.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._recorded_event(tensor.device).synchronize()
        return host

    @override
    def lap_clock(self, device: torch.device) -> LapClock:
        return DeviceLaps(self._module, device)

    def _recorded_event(self, device: torch.device) -> RecordedEvent:
        event = self._module.Event()
        event.record(self._module.current_stream(device))
        return event
