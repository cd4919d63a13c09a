"""A graph runtime that writes down everything it is asked for, and fails where it is told to."""

from dataclasses import dataclass, field

import torch

from vllm_omni.platforms.graphs import Capture, EagerGraph, GraphRuntime


@dataclass(frozen=True)
class FakeStream:
    name: str

    def wait_event(self, _event, /):
        raise AssertionError("waits go through the runtime")

    def wait_stream(self, _stream, /):
        raise AssertionError("waits go through the runtime")

    def synchronize(self):
        raise AssertionError("the host never waits")


@dataclass(frozen=True)
class FakeEvent:
    stream: str
    number: int


@dataclass
class FakeGraph:
    graph: EagerGraph
    runtime: "FakeRuntime"

    def replay(self):
        self.runtime.log.append(("replay", self.runtime.current.name))
        if self.runtime.failing == "replay":
            raise RuntimeError("injected replay failure")
        self.graph.replay()


@dataclass
class FakeRuntime(GraphRuntime):
    """Attributes:
    current: the stream that work goes to.
    log: every call, in order.
    failing: name of the call that raises.
    outputs: replaces what a capture returns.
    """

    name: str = "fake"
    current: FakeStream = FakeStream("producer")
    log: list[tuple] = field(default_factory=list)
    failing: str = ""
    capturing: bool = False
    outputs: object = None
    pools: int = 0

    def current_stream(self, _device):
        return self.current

    def is_capturing(self):
        return self.capturing

    def record_owner(self, tensor, stream):
        self.log.append(("own", tensor.data_ptr(), stream.name))

    def record_event(self, stream):
        self._fail_if("record_event")
        event = FakeEvent(stream.name, len(self.log))
        self.log.append(("record", event))
        return event

    def wait_event(self, stream, event):
        self.log.append(("wait", stream.name, event))

    def new_pool(self):
        self.pools += 1
        return f"pool {self.pools}"

    def capture(self, function, inputs, *, stream, pool):
        self._fail_if("capture")
        self.log.append(("capture", stream.name, pool))
        with torch.inference_mode():
            results = self.outputs(inputs) if self.outputs else function(*inputs)
        graph = EagerGraph(function, inputs, results)
        return Capture(FakeGraph(graph, self), results, ())

    def _fail_if(self, call):
        if self.failing == call:
            raise RuntimeError(f"injected {call} failure")
