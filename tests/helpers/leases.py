"""Leases over a fake runtime, which calls instead of replaying: fixtures, and one whole use."""

import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts, tiny_transformer_config
from tests.helpers.fake_graphs import FakeRuntime, FakeStream
from vllm_omni.diffusion.models.lingbot_world.lease import LeaseInputs, LeaseSignature
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    LeasedPostAttention,
    LeaseOptions,
)
from vllm_omni.diffusion.models.lingbot_world.quarantine import Quarantine

TOKENS, DIM = 6, tiny_transformer_config().dim
CPU = torch.device("cpu")
SIZE = LeaseSignature(tokens=TOKENS, dim=DIM, gate_rows=1, device=CPU)
SIDE, OTHER = FakeStream("side"), FakeStream("other")


def draw(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_inputs(seed=1, rows=1):
    hidden, gain, shift = (draw(TOKENS, DIM, seed=seed + index) for index in range(3))
    return LeaseInputs(hidden, draw(rows, DIM, seed=seed + 9, dtype=torch.float32), gain, shift)


def attended(seed=20):
    return draw(TOKENS, DIM, seed=seed)


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
def leases(runtime, quarantine):
    made = LeasedPostAttention(new_blocks(), runtime, LeaseOptions(report=quarantine.hold))
    made.prepare(SIZE)
    runtime.log.clear()
    return made


def new_blocks():
    with torch.inference_mode(mode=False):
        return [random_block(tiny_parts(), seed) for seed in range(2)]


def use(leases, layer=0, inputs=None, value=None):
    """One whole lease; copies of its outputs."""
    with leases.acquire(layer, inputs or some_inputs()) as lease:
        lease.projection_input.copy_(attended() if value is None else value)
        lease.mark_written()
        return [tensor.clone() for tensor in lease.finish().tensors]


def eager(leases, layer, inputs, value):
    return leases.blocks[layer].post_attention(value, *inputs.tensors)
