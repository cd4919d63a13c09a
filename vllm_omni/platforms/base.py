"""The interface between the package and a kind of device, and what GPUs and NPUs have in common."""

from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int8, Shaped
from torch import Tensor
from typing_extensions import override

from vllm_omni.platforms.graphs import GraphRuntime
from vllm_omni.platforms.laps import DeviceLaps, LapClock

LARGEST_INT8 = 127
QuantizedRows = tuple[Int8[Tensor, "rows columns"], Float32[Tensor, " rows"]]
"""Bytes, and one scale for each row."""
Weight = Int8[Tensor, "columns inner"]
ArrangedWeight = Int8[Tensor, "inner columns"]


class Int8Ops:
    """The operators of 8-bit linears, in plain torch where a device has none of its own.

    They are symmetric and dynamic: each row is divided by ``s = max|row| / 127`` and rounded half
    to even. The product of two such matrices is an exact integer, which is multiplied by both
    scales in float32. In plain torch they measure quality on any device and save no time.

    Attributes:
        widest: largest size of a last dimension that the operators take.
    """

    name = "reference"
    widest = 65535

    def quantize_rows(self, x: Float[Tensor, "rows columns"]) -> QuantizedRows:
        """Quantise a float16 or bfloat16 matrix to bytes and one scale for each row.

        A row of zeros has the scale zero and stays zero.
        """
        wide = x.float()
        scale = wide.abs().amax(dim=-1) / LARGEST_INT8
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        quantized = (wide / divisor.unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
        return quantized.to(torch.int8), scale

    def arrange_weight(self, weight: Weight, *, fractal: bool) -> ArrangedWeight:
        """Convert a quantised weight to the layout that :meth:`matmul` expects.

        Args:
            fractal: use the device's own tiles (NZ) instead of rows (ND), if it has any.
        """
        del fractal
        return weight.t().contiguous()

    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: ArrangedWeight,
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        """Compute ``x @ weight``, scaled, plus ``bias``, and round once to ``dtype``."""
        # Sums of products of bytes are exact in float64.
        exact = (x.double() @ weight.double()).float()
        scaled = exact * column_scale * row_scale.unsqueeze(-1)
        return (scaled if bias is None else scaled + bias.float()).to(dtype)


MOST_HEADS = 999
"""Largest number of heads that the vendor's rotary operator takes."""
WIDEST_HEAD = 894
"""Largest number of channels of a head that it takes."""
Turned = Float[Tensor, "1 tokens heads head_dim"]
"""Queries or keys that a rotary operator turns."""
Angles = Float[Tensor, "1 tokens 1 head_dim"]
"""Their cosines or sines: every angle twice, once for each channel of a pair."""


class RotaryMul:
    """The fused rotary operator, in plain torch where a device has none of its own.

    ``y = x * cos + turned(x) * sin``, where ``turned`` makes ``(-b, a)`` of each neighbouring pair
    ``(a, b)``. In plain torch it judges the rounding without the device and saves no time.
    """

    name = "reference"

    def __call__(self, x: Turned, cos: Angles, sin: Angles) -> Turned:
        """Rotate neighbouring pairs of channels; round every product and the sum to the dtype."""
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin


@runtime_checkable
class CompletionEvent(Protocol):
    """A mark in a device's queue of work."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has passed the mark."""
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

    @property
    def device_type(self) -> str:
        """``name``, as torch and users of the public package call it."""
        return self.name

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank and make it current for this process."""
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Return the bytes of memory that new tensors can take."""
        ...

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors held at once since the process started."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all queued work."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to host memory. The copy is complete on return; later work is not waited for."""
        ...

    def completion_event(self, device: torch.device) -> CompletionEvent | None:
        """Mark the end of the work queued so far.

        Returns:
            The mark, or ``None`` if memory that an exchange has touched may be freed as soon as the
            call that waits for the exchange has returned.
        """
        ...

    def lap_clock(self, device: torch.device) -> LapClock:
        """Return a clock for work on the device's current queue."""
        ...

    def int8_ops(self) -> Int8Ops:
        """Return the operators of 8-bit linears; raises ConfigError if the platform has none."""
        ...

    def rotary_mul(self) -> RotaryMul:
        """Return the fused rotary operator; raises ConfigError if the platform has none."""
        ...

    def graph_runtime(self) -> GraphRuntime:
        """Make a runtime that captures and replays work."""
        ...


_WITHOUT_QUEUE = {"cpu", "meta"}


def to_device(host: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Copy a small tensor to a device in the order of its queue, without waiting for the device.

    The copy goes through pinned memory: out of pageable memory it would wait for the queue. The
    allocator of pinned memory keeps a block until the copies out of it are done.

    Args:
        host: pageable tensor; it may be dropped or written to when this returns. It must not hold
            indices: on an NPU a kernel that runs before the copy would fault.
    """
    if device.type in _WITHOUT_QUEUE or host.device.type != "cpu":
        return host.to(device)
    return host.contiguous().pin_memory().to(device, non_blocking=True)


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
