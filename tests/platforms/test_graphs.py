"""Graph runtimes: the eager one here, the one over CUDA graphs where there is a GPU. Bitwise."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts
from tests.helpers.leases import DIM, TOKENS, eager, prepared
from tests.helpers.mark import hardware_test
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseInputs, LeaseSize
from vllm_omni.platforms import create_platform
from vllm_omni.platforms.graphs import (
    DeviceGraphRuntime,
    EagerGraph,
    GraphRuntime,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion]

CPU = torch.device("cpu")


def affine(x, y):
    return (x * 2 + y, x - y)


@pytest.mark.cpu
def test_an_eager_graph_is_undefined_before_its_first_replay_and_follows_its_inputs():
    runtime = GraphRuntime()
    x, y = torch.arange(4.0), torch.ones(4)
    capture = runtime.capture(
        affine, (x, y), stream=runtime.current_stream(CPU), pool=runtime.new_pool()
    )
    assert all(output.isnan().all() for output in capture.outputs)
    pointers = [output.data_ptr() for output in capture.outputs]
    for step in range(2):
        x.fill_(float(step))
        with torch.inference_mode():
            capture.graph.replay()
        for output, wanted in zip(capture.outputs, affine(x, y), strict=True):
            assert torch.equal(output, wanted)
    assert [output.data_ptr() for output in capture.outputs] == pointers


@pytest.mark.cpu
def test_a_host_has_one_stream_and_nothing_to_wait_for():
    runtime = create_platform("cpu").graph_runtime()
    stream = runtime.current_stream(CPU)
    assert runtime.name == "eager"
    assert runtime.current_stream(CPU) == stream
    assert not runtime.is_capturing()
    runtime.wait_event(stream, runtime.record_event(stream))
    runtime.record_owner(torch.ones(1), stream)


@dataclass(frozen=True)
class LoggedStream:
    name: str
    log: list

    def wait_event(self, event, /):
        self.log.append(("wait_event", self.name, event))

    def wait_stream(self, stream, /):
        self.log.append(("wait_stream", self.name, stream.name))

    def synchronize(self):
        self.log.append(("synchronize", self.name))


def logging_module(log):
    """What ``torch.cuda`` and its siblings offer to graphs, writing down every call."""

    @contextmanager
    def stream(which):
        log.append(("enter", which.name))
        yield
        log.append(("leave", which.name))

    @contextmanager
    def graph(_graph, *, pool, stream, capture_error_mode):
        log.append(("begin", pool, stream.name, capture_error_mode))
        yield
        log.append(("end",))

    module = ModuleType("fake_device")
    vars(module).update(
        Stream=lambda: LoggedStream("side", log), stream=stream, graph=graph,
        graph_pool_handle=lambda: (0, 7),
    )  # fmt: skip
    return module


@pytest.mark.cpu
def test_a_capture_primes_waits_and_leaves_other_threads_alone():
    """The order of calls, which no device without races would tell from another one."""
    log = []
    replayable = EagerGraph(affine, (), ())
    runtime = DeviceGraphRuntime("fake", logging_module(log), lambda: replayable)

    def function(x):
        log.append(("run", torch.is_inference_mode_enabled()))
        return (x + log.count(("run", True)),)

    x, main = torch.zeros(2), LoggedStream("main", log)
    capture = runtime.capture(function, (x,), stream=main, pool=runtime.new_pool())
    assert log == [
        ("wait_stream", "side", "main"),
        ("enter", "side"), ("run", True), ("leave", "side"),
        ("synchronize", "side"),
        ("begin", (0, 7), "side", "thread_local"), ("run", True), ("end",),
        ("synchronize", "side"),
        ("wait_stream", "main", "side"),
    ]  # fmt: skip
    assert torch.equal(capture.outputs[0], torch.full((2,), 2.0))  # of the second run
    assert capture.graph is replayable
    pool, side, inputs = capture.keepalive
    assert (pool, side.name) == ((0, 7), "side")
    assert inputs[0] is x


def some_inputs(seed, device):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(TOKENS, DIM, generator=generator).bfloat16().to(device) for _ in range(4)]
    gate = torch.randn(1, DIM, generator=generator).to(device)
    return LeaseInputs(draw[0], gate, draw[1], draw[2]), draw[3]


@hardware_test({"cuda": "H100"})
@torch.inference_mode()
def test_cuda_graphs_replay_the_bytes_of_the_modules_on_two_streams_in_turn():
    """Each slot is used again on the other stream, while its last reader may be under way."""
    platform = create_platform("cuda")
    device = platform.device(0)
    with torch.inference_mode(mode=False):
        blocks = [random_block(tiny_parts(), seed).to(device) for seed in range(2)]
    leases = prepared(blocks, platform.graph_runtime(), size=LeaseSize(TOKENS, DIM, device))
    streams, results, wanted = [torch.cuda.current_stream(), torch.cuda.Stream()], [], []
    for seed in range(8):
        block, (inputs, value) = blocks[seed % 2], some_inputs(seed, device)
        wanted.append(eager(block, inputs, value)[1])
        stream = streams[seed // 2 % 2]
        stream.wait_stream(streams[0])
        with torch.cuda.stream(stream), leases.acquire(block, inputs) as lease:
            lease.stage(value)
            results.append(lease.finish().residual + 0)
    platform.synchronize(device)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert leases.record.slot_reuse_waits == 6
