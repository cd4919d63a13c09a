"""Leased post-attention graphs of two tiny blocks over a fake runtime, as values and fixtures."""

import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts, tiny_transformer_config
from tests.helpers.fake_graphs import FakeRuntime, FakeStream
from vllm_omni.diffusion.models.lingbot_world.attention import CameraModulation
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseInputs, LeaseSize
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import LeasedPostAttention
from vllm_omni.platforms.quarantine import Quarantine

TOKENS, DIM = 6, tiny_transformer_config().dim
SIZE = LeaseSize(TOKENS, DIM, torch.device("cpu"))
SIDE = FakeStream("side")


def draw(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_inputs(seed=1, rows=1):
    hidden, gain, shift = (draw(TOKENS, DIM, seed=seed + index) for index in range(3))
    return LeaseInputs(hidden, draw(rows, DIM, seed=seed + 9, dtype=torch.float32), gain, shift)


def attended(seed=20):
    return draw(TOKENS, DIM, seed=seed)


def new_blocks():
    with torch.inference_mode(mode=False):
        return [random_block(tiny_parts(), seed) for seed in range(2)]


def prepared(blocks, runtime, quarantine=None, size=SIZE):
    made = LeasedPostAttention(runtime, size, quarantine=quarantine or Quarantine())
    made.prepare(blocks)
    return made


def use(leases, block, inputs=None, value=None):
    """One whole lease; copies of its outputs."""
    with leases.acquire(block, inputs or some_inputs()) as lease:
        lease.projection_input.copy_(attended() if value is None else value)
        lease.mark_written()
        return [tensor.clone() for tensor in lease.finish()]


def eager(block, inputs, value):
    """What the graph stands for, by the block's own modules."""
    projected = block.self_attn.o(value)
    camera = CameraModulation(inputs.gain, inputs.shift)
    return projected, *block.after_projection(projected, inputs.hidden, inputs.gate, camera)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def runtime():
    return FakeRuntime()


@pytest.fixture
def quarantine():
    return Quarantine()


@pytest.fixture
def blocks():
    return new_blocks()


@pytest.fixture
def leases(blocks, runtime, quarantine):
    made = prepared(blocks, runtime, quarantine)
    runtime.log.clear()
    return made
