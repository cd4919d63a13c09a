"""What the rest of the package asks of a device; implemented once per platform."""

from typing import Protocol, runtime_checkable

import torch

from vllm_omni.platforms.graphs import GraphRuntime
from vllm_omni.platforms.int8 import Int8Ops
from vllm_omni.platforms.laps import LapClock
from vllm_omni.platforms.rotary import RotaryMul


@runtime_checkable
class CompletionEvent(Protocol):
    """A mark in a device's queue of work."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


@runtime_checkable
class Platform(Protocol):
    """A kind of device. One object per process, chosen when the process starts.

    Attributes:
        name: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        collective_backend: backend of ``torch.distributed`` for tensors of this device.
        attention_backend: name in the attention registry when the configuration says ``auto``.
        pool_from_free_memory: whether the KV pool takes a share of free memory. Where it does
            not, the pool is sized by the number of sessions.
    """

    name: str
    collective_backend: str
    attention_backend: str
    pool_from_free_memory: bool

    def device(self, local_rank: int) -> torch.device:
        """The device of a rank, made current for this process."""
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Memory that new tensors can take."""
        ...

    def peak_bytes(self, device: torch.device) -> int:
        """Largest number of bytes that tensors held at once since the process started."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all queued work."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to host memory; complete when this returns, without waiting for later work."""
        ...

    def completion_event(self, device: torch.device) -> CompletionEvent | None:
        """Mark the end of the work queued so far.

        ``None`` where memory that an exchange has touched may be given back as soon as the call
        that waits for the exchange returns.
        """
        ...

    def lap_clock(self, device: torch.device) -> LapClock:
        """A clock for work on the device's current queue."""
        ...

    def int8_ops(self) -> Int8Ops:
        """Operators of 8-bit linears.

        Raises:
            ConfigError: if the platform has none.
        """
        ...

    def rotary_mul(self) -> RotaryMul:
        """The fused rotary operator.

        Raises:
            ConfigError: if the platform has none.
        """
        ...

    def graph_runtime(self) -> GraphRuntime:
        """How work is captured and replayed."""
        ...
