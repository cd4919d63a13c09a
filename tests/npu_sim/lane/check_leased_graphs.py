"""Leased post-attention graphs over the vendor's own graphs, streams, events and allocator.

Bitwise: a captured block runs the modules of the block. In deferred order a fence that is missing
lets a later replay overwrite what a reader has not read yet.
"""

import copy
import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts
from tests.helpers.leases import DIM, TOKENS, draw, eager, prepared, use
from tests.helpers.sessions import make_chunks, small_request
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_prompt
from tests.npu_sim import simulation
from tests.npu_sim.device import deferred, device, order, platform
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import PromptStep
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseInputs, LeaseSize
from vllm_omni.diffusion.models.lingbot_world.session import SessionSetup
from vllm_omni.errors import WorkerFailedError
from vllm_omni.platforms import create_platform
from vllm_omni.platforms.graphs import DeviceGraphRuntime
from vllm_omni.platforms.quarantine import QUARANTINE

__all__ = ["deferred", "device", "order", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

DEVICE = torch.device("npu", 0)
CHUNKS = 4
PROMPTS = {2: PromptStep(tiny_prompt("a frozen lake"), 1.0)}
RECIPE = Path(__file__).resolve().parents[3] / "docs" / "recipes" / "lingbot_world_v2_npu.md"
BLOCKS, WIDTH, CHUNK_TOKENS = 40, 5120, 4680
"""Of the released model, and of a chunk at 832x480."""
MIB = 2**20


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def on_device(seed):
    """Inputs of a block and an attention output, on the device."""
    hidden, gain, shift, value = (draw(TOKENS, DIM, seed=seed + i).to("npu") for i in range(4))
    gate = draw(1, DIM, seed=seed + 9, dtype=torch.float32).to("npu")
    return LeaseInputs(hidden, gate, gain, shift), value


@pytest.fixture
def blocks(device):
    return [random_block(tiny_parts(), seed).to(device) for seed in range(2)]


@pytest.fixture
def leases(platform, device, blocks):
    return prepared(blocks, platform.graph_runtime(), size=LeaseSize(TOKENS, DIM, device))


def one_block():
    """A block and the leases of its graphs."""
    with torch.inference_mode(mode=False):
        block = random_block(tiny_parts()).to(DEVICE)
    runtime = create_platform("npu").graph_runtime()
    return block, prepared([block], runtime, size=LeaseSize(TOKENS, DIM, DEVICE))


@pytest.mark.usefixtures("inference")
def test_captured_blocks_give_the_bytes_of_uncaptured_ones(leases, blocks):
    assert leases.runtime.name == "npu"
    for seed in (1, 40, 80, 120):  # each slot twice
        for block in blocks:
            inputs, value = on_device(seed)
            got = use(leases, block, inputs, value)
            wanted = eager(block, inputs, value)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, wanted, strict=True))
    assert leases.record.captures == 4


def lease_on_two_streams(block, leases):
    """A lease on a side stream whose reader is slow, then two on the main one; what each read."""
    side, results, values = torch.npu.Stream(), [], [on_device(seed) for seed in (1, 40, 80)]
    torch.npu.synchronize()
    for turn, (inputs, value) in enumerate(values):
        stream = side if turn == 0 else torch.npu.current_stream()
        with torch.npu.stream(stream), leases.acquire(block, inputs) as lease:
            lease.stage(value)
            outputs = lease.finish()
            simulation.runtime().run_stream(stream.npu_stream)
            results.append(outputs.residual + 0)
    simulation.runtime().run_stream(torch.npu.current_stream().npu_stream)
    torch.npu.synchronize()
    wanted = [eager(block, inputs, value)[1] for inputs, value in values]
    return [torch.equal(a.cpu(), b.cpu()) for a, b in zip(results, wanted, strict=True)]


@pytest.mark.usefixtures("inference")
def test_a_reader_on_another_stream_is_right_after_its_slot_was_used_again(leases, blocks):
    assert lease_on_two_streams(blocks[0], leases) == [True, True, True]
    assert leases.record.slot_reuse_waits == 1


@pytest.mark.usefixtures("deferred", "inference")
def test_without_the_reuse_fence_that_reader_is_wrong(monkeypatch):
    block, leases = one_block()
    monkeypatch.setattr(DeviceGraphRuntime, "wait_event", lambda *_: None)
    assert lease_on_two_streams(block, leases) == [False, True, True]


def lease_on_a_side_stream(block, leases):
    """Inputs and attention output freed by the host before the lease's stream has read them, and
    their memory asked for and written again; whether the lease still saw what they held."""
    inputs, value = on_device(1)
    wanted = eager(block, inputs, value)[1]
    torch.npu.synchronize()
    sizes = [(tensor.shape, tensor.dtype) for tensor in (value, *inputs)]
    side = torch.npu.Stream()
    with torch.npu.stream(side), leases.acquire(block, inputs) as lease:
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
    assert lease_on_a_side_stream(*one_block())


@pytest.mark.usefixtures("deferred", "inference")
def test_without_owners_the_memory_of_freed_inputs_is_given_away(monkeypatch):
    block, leases = one_block()
    monkeypatch.setattr(DeviceGraphRuntime, "record_owner", lambda *_: None)
    assert not lease_on_a_side_stream(block, leases)


@pytest.mark.timing  # what a stream that lags behind still uses is not given to the next graph
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.usefixtures("inference")
def test_graphs_of_a_slot_share_all_memory_but_their_outputs_and_the_recipe_says_how_much(ranks):
    """In bytes of the real size: more tokens stand for the missing width, which costs no time."""
    tokens = CHUNK_TOKENS // ranks * (WIDTH // DIM)
    output_bytes = 3 * tokens * DIM * 2
    with torch.inference_mode(mode=False):
        block = random_block(tiny_parts()).to(DEVICE)
    blocks = [copy.copy(block) for _ in range(BLOCKS)]
    runtime = create_platform("npu").graph_runtime()
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved(), torch.npu.memory_allocated()
    leases = prepared(blocks, runtime, size=LeaseSize(tokens, DIM, DEVICE))
    reserved_bytes = torch.npu.memory_reserved() - before[0]
    allocated_bytes = torch.npu.memory_allocated() - before[1]
    needed_bytes = sum(buffer.nbytes for slot in leases.slots for buffer in slot.buffers)
    needed_bytes += leases.record.captures * output_bytes
    assert leases.record.captures == 2 * BLOCKS
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
    record = leased.worker.pipeline.model.transformer.post_attention.record
    assert record.captures == 2 * 3
    assert record.replays == 2 * CHUNKS * (4 * 3 + 2)
    leased.shutdown()


@pytest.mark.usefixtures("order")
def test_a_replay_that_the_device_refuses_asks_for_a_restart(monkeypatch):
    executor = InlineExecutor(config(leased=True))
    executor.start()
    executor.open_session("lost", small_request(num_chunks=1))

    def refuse(_graph):
        raise RuntimeError("replay refused by the device, error code 507011")

    monkeypatch.setattr(torch.npu.NPUGraph, "replay", refuse)
    gc.collect()  # What an earlier test left would be freed in between.
    held = torch.npu.memory_allocated()
    held_before = QUARANTINE.size
    with pytest.raises(WorkerFailedError, match="workers have to be restarted"):
        make_chunks(executor, "lost", range(1))
    assert executor.worker.pipeline.model.transformer.post_attention.record.failed
    (failure,) = QUARANTINE.held[held_before:]
    for kind in (LeaseInputs, SessionSetup):
        assert any(isinstance(owner, kind) for owner in failure.owners)
    assert torch.npu.memory_allocated() >= held
    executor.shutdown()
