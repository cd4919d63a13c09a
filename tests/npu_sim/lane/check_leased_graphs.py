"""Leased post-attention graphs over the vendor's own graphs, streams, events and allocator.

Bitwise: a captured block runs the modules of the block. In deferred order a fence that is missing
lets a later replay overwrite what a reader has not read yet.
"""

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts, tiny_transformer_config
from tests.helpers.sessions import make_chunks, small_request
from tests.helpers.tiny import tiny_checkpoint_dir
from tests.npu_sim import simulation
from tests.npu_sim.device import deferred, device, order, platform
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import PromptStep
from vllm_omni.diffusion.models.lingbot_world.lease import LeaseInputs, LeaseSignature
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import LeasedPostAttention
from vllm_omni.diffusion.models.lingbot_world.session import SessionParts
from vllm_omni.errors import WorkerFailedError
from vllm_omni.platforms import create_platform
from vllm_omni.platforms.graphs import DeviceGraphRuntime

__all__ = ["deferred", "device", "order", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

DEVICE = torch.device("npu", 0)
TOKENS, DIM = 6, tiny_transformer_config().dim
CHUNKS = 4
PROMPTS = {2: PromptStep("a frozen lake", 1.0)}
RECIPE = Path(__file__).resolve().parents[3] / "docs" / "recipes" / "lingbot_world_v2_npu.md"
BLOCKS, WIDTH, CHUNK_TOKENS = 40, 5120, 4680
"""Of the released model, and of a chunk at 832x480."""
MIB = 2**20


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def draw(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(seed):
    """Inputs of a block and an attention output, on the device."""
    hidden, gain, shift, value = (draw(TOKENS, DIM, seed=seed + i).to("npu") for i in range(4))
    gate = draw(1, DIM, seed=seed + 9, dtype=torch.float32).to("npu")
    return LeaseInputs(hidden, gate, gain, shift), value


@pytest.fixture
def leases(platform, device):
    blocks = [random_block(tiny_parts(), seed).to(device) for seed in range(2)]
    made = LeasedPostAttention(blocks, platform.graph_runtime())
    made.prepare(LeaseSignature(TOKENS, DIM, 1, device))
    return made


def leases_of_one_block():
    runtime = create_platform("npu").graph_runtime()
    with torch.inference_mode(mode=False):
        made = LeasedPostAttention([random_block(tiny_parts()).to(DEVICE)], runtime)
    made.prepare(LeaseSignature(TOKENS, DIM, 1, DEVICE))
    return made


def use(leases, layer, inputs, value):
    with leases.acquire(layer, inputs) as lease:
        lease.projection_input.copy_(value)
        lease.mark_written()
        outputs = lease.finish()
        return [tensor.clone() for tensor in outputs.tensors]


@pytest.mark.usefixtures("inference")
def test_captured_blocks_give_the_bytes_of_uncaptured_ones(leases):
    assert leases.runtime.name == "npu"
    for seed in (1, 40, 80, 120):  # each slot twice
        for layer in (0, 1):
            inputs, value = on_device(seed)
            got = use(leases, layer, inputs, value)
            wanted = leases.blocks[layer].post_attention(value, *inputs.tensors)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, wanted, strict=True))
    assert leases.counters.captures == 4


def read_on_another_stream(leases):
    """A slow reader on a side stream, then two more leases on the main one; all three results."""
    side, results = torch.npu.Stream(), []
    for turn, seed in enumerate((1, 40, 80)):
        inputs, value = on_device(seed)
        torch.npu.current_stream().synchronize()
        with leases.acquire(0, inputs) as lease:
            lease.stage(value)
            lease.finish()
            reader = side if turn == 0 else torch.npu.current_stream()
            with torch.npu.stream(reader):
                results.append(lease.consume(reader).residual + 0)
    simulation.runtime().run_stream(torch.npu.current_stream().npu_stream)
    torch.npu.synchronize()
    wanted = []
    for seed in (1, 40, 80):
        inputs, value = on_device(seed)
        wanted.append(leases.blocks[0].post_attention(value, *inputs.tensors)[1])
    return [torch.equal(a.cpu(), b.cpu()) for a, b in zip(results, wanted, strict=True)]


@pytest.mark.usefixtures("inference")
def test_a_reader_on_another_stream_is_right_after_its_slot_was_used_again(leases):
    assert read_on_another_stream(leases) == [True, True, True]
    assert leases.counters.consumer_fences == 1
    assert leases.counters.slot_reuse_waits == 2  # the producer's and the reader's


@pytest.mark.usefixtures("deferred", "inference")
def test_without_the_reuse_fence_that_reader_is_wrong(monkeypatch):
    leases = leases_of_one_block()
    wait = DeviceGraphRuntime.wait_event

    def only_side_waits(self, stream, event):
        if stream != self.current_stream(DEVICE):
            wait(self, stream, event)

    monkeypatch.setattr(DeviceGraphRuntime, "wait_event", only_side_waits)
    assert read_on_another_stream(leases) == [False, True, True]


@pytest.mark.usefixtures("deferred", "inference")
def test_without_the_ready_fence_that_reader_is_wrong(monkeypatch):
    leases = leases_of_one_block()
    monkeypatch.setattr(DeviceGraphRuntime, "wait_event", lambda *_: None)
    inputs, value = on_device(1)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with leases.acquire(0, inputs) as lease:
        lease.stage(value)
        lease.finish()
        with torch.npu.stream(side):
            read = lease.consume(side).residual + 0
        simulation.runtime().run_stream(side.npu_stream)
    torch.npu.synchronize()
    wanted = leases.blocks[0].post_attention(value, *inputs.tensors)[1]
    assert not torch.equal(read.cpu(), wanted.cpu())


def lease_on_a_side_stream(leases):
    """Inputs and attention output freed by the host before the lease's stream has read them, and
    their memory asked for and written again; whether the lease still saw what they held."""
    inputs, value = on_device(1)
    wanted = leases.blocks[0].post_attention(value, *inputs.tensors)[1]
    torch.npu.synchronize()
    sizes = [(tensor.shape, tensor.dtype) for tensor in (value, *inputs.tensors)]
    side = torch.npu.Stream()
    with torch.npu.stream(side), leases.acquire(0, inputs) as lease:
        lease.stage(value)
        got = lease.finish().residual + 0
    del inputs, value
    taken = [torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in sizes]
    for tensor in taken:
        tensor.fill_(torch.nan)
    torch.npu.default_stream().synchronize()
    torch.npu.synchronize()
    return torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.usefixtures("deferred", "inference")
def test_inputs_that_are_freed_at_once_are_kept_for_the_stream_that_reads_them():
    assert lease_on_a_side_stream(leases_of_one_block())


@pytest.mark.usefixtures("deferred", "inference")
def test_without_owners_the_memory_of_freed_inputs_is_given_away(monkeypatch):
    leases = leases_of_one_block()
    monkeypatch.setattr(DeviceGraphRuntime, "record_owner", lambda *_: None)
    assert not lease_on_a_side_stream(leases)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.usefixtures("inference")
def test_graphs_of_a_slot_share_all_memory_but_their_outputs_and_the_recipe_says_how_much(ranks):
    """In bytes of the real size: more tokens stand for the missing width, which costs no time."""
    tokens = CHUNK_TOKENS // ranks * (WIDTH // DIM)
    output_bytes = 3 * tokens * DIM * 2
    with torch.inference_mode(mode=False):
        block = random_block(tiny_parts()).to(DEVICE)
    leases = LeasedPostAttention([block] * BLOCKS, create_platform("npu").graph_runtime())
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved(), torch.npu.memory_allocated()
    leases.prepare(LeaseSignature(tokens, DIM, 1, DEVICE))
    reserved_bytes = torch.npu.memory_reserved() - before[0]
    allocated_bytes = torch.npu.memory_allocated() - before[1]
    slots = leases.slots(LeaseSignature(tokens, DIM, 1, DEVICE))
    needed_bytes = sum(buffer.nbytes for slot in slots for buffer in slot.buffers)
    needed_bytes += leases.counters.captures * output_bytes
    assert leases.counters.captures == 2 * BLOCKS
    assert needed_bytes <= allocated_bytes <= 1.05 * needed_bytes
    figure = re.search(rf"([\d,]+) MiB at {CHUNK_TOKENS // ranks:,}", RECIPE.read_text())
    documented_bytes = int(figure[1].replace(",", "")) * MIB
    assert allocated_bytes <= reserved_bytes <= 1.15 * needed_bytes
    assert 0.95 * documented_bytes <= reserved_bytes <= documented_bytes


def config(*, leased):
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), device="npu", dtype="bfloat16",
        geometry=VideoGeometry(64, 96), leased_post_attention=leased,
    )  # fmt: skip


def rollouts(executor, names):
    """The same world several times, each opened anew; its window rolls in the last chunk."""
    made = []
    for name in names:
        executor.open_session(name, small_request(num_chunks=CHUNKS))
        made.append([c.data for c in make_chunks(executor, name, range(CHUNKS), PROMPTS)])
        executor.close_session(name)
    return made


@pytest.mark.usefixtures("order")
def test_a_world_over_graphs_has_the_bytes_of_one_without():
    plain = InlineExecutor(config(leased=False))
    plain.start()
    (wanted,) = rollouts(plain, ["plain"])
    plain.shutdown()
    leased = InlineExecutor(config(leased=True))
    leased.start()
    for got in rollouts(leased, ["first", "again"]):
        assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    counters = leased.worker.pipeline.parts.leases.counters
    assert counters.captures == 2 * 3
    assert counters.replays == 2 * CHUNKS * (4 * 3 + 2)
    leased.shutdown()


@pytest.mark.usefixtures("order")
def test_a_replay_that_the_device_refuses_asks_for_a_restart(monkeypatch):
    executor = InlineExecutor(config(leased=True))
    executor.start()
    executor.open_session("lost", small_request(num_chunks=1))

    def refuse(_graph):
        raise RuntimeError("replay refused by the device, error code 507011")

    monkeypatch.setattr(torch.npu.NPUGraph, "replay", refuse)
    held = torch.npu.memory_allocated()
    with pytest.raises(WorkerFailedError, match="workers have to be restarted"):
        make_chunks(executor, "lost", range(1))
    leases = executor.worker.pipeline.parts.leases
    assert leases.failed
    of_the_lease, of_the_chunk = leases.quarantine
    assert any(isinstance(owner, LeaseInputs) for owner in of_the_lease)
    assert any(isinstance(owner, SessionParts) for owner in of_the_chunk)
    assert torch.npu.memory_allocated() >= held
    executor.shutdown()
