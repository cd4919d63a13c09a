"""Capture of device work into graphs that are replayed; one runtime per kind of device."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

GraphFunction = Callable[..., tuple[Tensor, ...]]
"""Work on fixed input tensors. It must not wait for the device nor look at values."""


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in a stream's work."""


@runtime_checkable
class DeviceStream(Protocol):
    """A queue of device work. Two streams with the same work are equal."""

    def wait_event(self, event: DeviceEvent, /) -> None:
        """Let later work of this stream wait for the event."""
        ...

    def wait_stream(self, stream: object, /) -> None:
        """Let later work of this stream wait for all present work of another."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        ...


@runtime_checkable
class GraphPool(Protocol):
    """Device memory that captured graphs share."""


@runtime_checkable
class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Queue the captured work on the current stream."""
        ...


@dataclass(frozen=True, slots=True)
class Capture:
    """One captured function.

    Attributes:
        outputs: rewritten in place by every replay; undefined before the first, and after the
            replay of another graph of the same pool.
        keepalive: what the graph's memory and work hang on.
    """

    graph: Replayable
    outputs: tuple[Shaped[Tensor, "..."], ...]
    keepalive: tuple[object, ...]


@runtime_checkable
class GraphRuntime(Protocol):
    """What leased graphs ask of a device, and the only part of them that touches its interface."""

    name: str

    def current_stream(self, device: torch.device) -> DeviceStream:
        """The stream that work queued now goes to."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        ...

    def record_owner(self, tensor: Shaped[Tensor, "..."], stream: DeviceStream) -> None:
        """Keep the tensor's memory from reuse until the stream's present work is done."""
        ...

    def record_event(self, stream: DeviceStream) -> DeviceEvent:
        """Mark the end of the stream's present work."""
        ...

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Let later work of the stream wait for the event."""
        ...

    def new_pool(self) -> GraphPool:
        """Memory for graphs that never run at the same time, nor while an output of another one
        of them is still read: each may work in what the others give back, or return there."""
        ...

    def capture(
        self,
        function: GraphFunction,
        inputs: tuple[Shaped[Tensor, "..."], ...],
        *,
        stream: DeviceStream,
        pool: GraphPool,
    ) -> Capture:
        """Record ``function(*inputs)``.

        Args:
            stream: its present work comes before, its later work after the capture.
            pool: holds outputs and what lies between.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphInterface:
    """Names under which a device module of torch keeps its graphs.

    Attributes:
        module: ``torch.cuda`` or its sibling of another device.
        new_graph: makes an empty graph.
    """

    module: ModuleType
    new_graph: Callable[[], Replayable]


class DeviceGraphRuntime:
    """Graphs of a device whose module follows the interface of ``torch.cuda``.

    All captures share one side stream, since streams are few.
    """

    def __init__(self, name: str, interface: GraphInterface) -> None:
        self.name = name
        self._interface = interface
        self._capture_stream = interface.module.Stream()

    def current_stream(self, device: torch.device) -> DeviceStream:
        """See :class:`GraphRuntime`."""
        return self._interface.module.current_stream(device)

    def is_capturing(self) -> bool:
        """See :class:`GraphRuntime`."""
        return self._interface.module.is_current_stream_capturing()

    def record_owner(self, tensor: Shaped[Tensor, "..."], stream: DeviceStream) -> None:
        """See :class:`GraphRuntime`."""
        tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def record_event(self, stream: DeviceStream) -> DeviceEvent:
        """See :class:`GraphRuntime`."""
        event = self._interface.module.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """See :class:`GraphRuntime`."""
        stream.wait_event(event)

    def new_pool(self) -> GraphPool:
        """See :class:`GraphRuntime`."""
        return self._interface.module.graph_pool_handle()

    def capture(
        self,
        function: GraphFunction,
        inputs: tuple[Shaped[Tensor, "..."], ...],
        *,
        stream: DeviceStream,
        pool: GraphPool,
    ) -> Capture:
        """See :class:`GraphRuntime`. One run before the capture lets kernels load themselves."""
        module, side = self._interface.module, self._capture_stream
        side.wait_stream(stream)
        with torch.inference_mode(), module.stream(side):
            function(*inputs)
        side.synchronize()
        graph = self._interface.new_graph()
        # Other threads may use the device meanwhile, which a global capture would forbid.
        with (
            torch.inference_mode(),
            module.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            outputs = function(*inputs)
        side.synchronize()
        stream.wait_stream(side)
        return Capture(graph, outputs, (pool, side, inputs))


class HostEvent:
    """Host work is done when it returns."""


class HostPool:
    """Memory of a host, which every result takes for itself."""


class HostStream:
    """The one queue of a host: its work is done when it is queued."""

    def wait_event(self, event: DeviceEvent, /) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: object, /) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True, slots=True)
class EagerGraph:
    """Calls the function again and writes its results over the last ones."""

    function: GraphFunction
    inputs: tuple[Shaped[Tensor, "..."], ...]
    outputs: tuple[Shaped[Tensor, "..."], ...]

    def replay(self) -> None:
        """Run now."""
        for output, value in zip(self.outputs, self.function(*self.inputs), strict=True):
            output.copy_(value)


class EagerGraphRuntime:
    """The same contract without graphs, for devices that have none; gains nothing."""

    name = "eager"

    def __init__(self) -> None:
        self._stream = HostStream()

    def current_stream(self, device: torch.device) -> DeviceStream:
        """See :class:`GraphRuntime`."""
        del device
        return self._stream

    def is_capturing(self) -> bool:
        """See :class:`GraphRuntime`."""
        return False

    def record_owner(self, tensor: Shaped[Tensor, "..."], stream: DeviceStream) -> None:
        """Memory of a host is not reused while it has a reader."""

    def record_event(self, stream: DeviceStream) -> DeviceEvent:
        """See :class:`GraphRuntime`."""
        del stream
        return HostEvent()

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """See :class:`GraphRuntime`."""
        stream.wait_event(event)

    def new_pool(self) -> GraphPool:
        """See :class:`GraphRuntime`."""
        return HostPool()

    def capture(
        self,
        function: GraphFunction,
        inputs: tuple[Shaped[Tensor, "..."], ...],
        *,
        stream: DeviceStream,
        pool: GraphPool,
    ) -> Capture:
        """See :class:`GraphRuntime`. Outputs hold NaN until the first replay."""
        del stream, pool
        with torch.inference_mode():
            outputs = tuple(output.clone().fill_(torch.nan) for output in function(*inputs))
        return Capture(EagerGraph(function, inputs, outputs), outputs, ())
