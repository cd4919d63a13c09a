"""Capture of device work into graphs that are replayed, with one runtime per kind of device."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor
from typing_extensions import override

Tensors = tuple[Shaped[Tensor, "..."], ...]
GraphFunction = Callable[..., tuple[Tensor, ...]]
"""Work on fixed input tensors. It must not wait for the device and not look at values."""


DeviceEvent = object
"""A point in the work of a stream, as the device's library has it."""
GraphPool = object
"""A memory pool shared by graphs, as the device's library has it.

Two graphs of one pool must never run concurrently, and no graph may run while an output of another
one is still being read.
"""


@runtime_checkable
class DeviceStream(Protocol):
    """A queue of device work. Two objects that stand for the same queue are equal."""

    def wait_event(self, event: DeviceEvent, /) -> None:
        """Make later work of this stream wait for the event."""
        ...

    def wait_stream(self, stream: object, /) -> None:
        """Make later work of this stream wait for all present work of another one."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for all work of this stream."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """A graph that has been captured."""

    def replay(self) -> None:
        """Queue the captured work on the current stream."""
        ...


@dataclass(frozen=True, slots=True)
class Capture:
    """The graph of one captured function.

    Attributes:
        outputs: tensors that every replay writes again. They are undefined before the first
            replay and after a replay of another graph of the same pool.
        keepalive: objects that must live as long as the graph.
    """

    graph: Replayable
    outputs: Tensors
    keepalive: tuple[object, ...]


class HostStream(DeviceStream):
    """The queue of a host, whose work is done when it is queued."""

    @override
    def wait_event(self, event: DeviceEvent, /) -> None:
        pass

    @override
    def wait_stream(self, stream: object, /) -> None:
        pass

    @override
    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EagerGraph(Replayable):
    """Calls the function again and writes the results over the last ones."""

    function: GraphFunction
    inputs: Tensors
    outputs: Tensors

    @override
    def replay(self) -> None:
        for output, value in zip(self.outputs, self.function(*self.inputs), strict=True):
            output.copy_(value)


class GraphRuntime:
    """The calls on streams, events and graphs that leased post-attention graphs need.

    This one is for devices without graphs: it calls functions instead of replaying. It saves no
    time.
    """

    name = "eager"

    def __init__(self) -> None:
        self._stream = HostStream()

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream that receives the work queued now."""
        del device  # a host has one
        return self._stream

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured."""
        return False

    def record_owner(self, tensor: Shaped[Tensor, "..."], stream: DeviceStream) -> None:
        """Prevent reuse of the tensor's memory until the stream's present work is done."""

    def record_event(self, stream: DeviceStream) -> DeviceEvent:
        """Mark the end of the stream's present work."""
        del stream  # its work is done
        return object()

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Make later work of the stream wait for the event."""
        stream.wait_event(event)

    def new_pool(self) -> GraphPool:
        """Make a pool that no graph uses yet."""
        return object()

    def capture(
        self, function: GraphFunction, inputs: Tensors, *, stream: DeviceStream, pool: GraphPool
    ) -> Capture:
        """Capture ``function(*inputs)`` into a graph; its outputs are undefined until a replay.

        Args:
            stream: its present work comes before the capture, its later work after it.
            pool: memory of the outputs and of everything in between.
        """
        del stream, pool  # nothing is queued, and every result allocates its own memory
        with torch.inference_mode():
            outputs = tuple(output.clone().fill_(torch.nan) for output in function(*inputs))
        return Capture(EagerGraph(function, inputs, outputs), outputs, ())


class DeviceGraphRuntime(GraphRuntime):
    """Captures graphs on a device. All captures share one side stream, since streams are few.

    Args:
        module: ``torch.cuda``, or the module of another device with the same interface.
        new_graph: makes an empty graph.
    """

    def __init__(self, name: str, module: ModuleType, new_graph: Callable[[], Replayable]) -> None:
        self.name = name
        self._module = module
        self._new_graph = new_graph
        self._capture_stream = module.Stream()

    @override
    def current_stream(self, device: torch.device) -> DeviceStream:
        return self._module.current_stream(device)

    @override
    def is_capturing(self) -> bool:
        return self._module.is_current_stream_capturing()

    @override
    def record_owner(self, tensor: Shaped[Tensor, "..."], stream: DeviceStream) -> None:
        tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]

    @override
    def record_event(self, stream: DeviceStream) -> DeviceEvent:
        event = self._module.Event()
        event.record(stream)
        return event

    @override
    def new_pool(self) -> GraphPool:
        return self._module.graph_pool_handle()

    @override
    def capture(
        self, function: GraphFunction, inputs: Tensors, *, stream: DeviceStream, pool: GraphPool
    ) -> Capture:
        """Run the function once, which loads its kernels, then capture it."""
        module, side = self._module, self._capture_stream
        side.wait_stream(stream)
        with torch.inference_mode(), module.stream(side):
            function(*inputs)
        side.synchronize()
        graph = self._new_graph()
        # Other threads may use the device meanwhile, which a global capture would forbid.
        with (
            torch.inference_mode(),
            module.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            outputs = function(*inputs)
        side.synchronize()
        stream.wait_stream(side)
        return Capture(graph, outputs, (pool, side, inputs))
