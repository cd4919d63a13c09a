"""Leases of post-attention graphs: what they compute, their fences and their set-up.

The runtime is a fake that calls instead of replaying, so equalities are bitwise.
"""

import copy

import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts
from tests.helpers.fake_graphs import FakeStream
from tests.helpers.leases import (
    DIM,
    SIDE,
    SIZE,
    TOKENS,
    attended,
    blocks,
    eager,
    inference,
    leases,
    prepared,
    quarantine,
    runtime,
    some_inputs,
    use,
)
from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseInputs, LeaseSize
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    LeaseError,
    LeaseState,
    SlotsBusyError,
)
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Int8Ops

__all__ = ["blocks", "inference", "leases", "quarantine", "runtime"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("rows", [1, 3])
def test_a_lease_gives_the_bytes_of_the_modules_and_leaves_its_inputs_alone(blocks, runtime, rows):
    leases = prepared(blocks, runtime, size=LeaseSize(TOKENS, DIM, SIZE.device, rows))
    for block in blocks:
        for seed in (1, 40, 80):  # both slots, and the first one again
            inputs, value = some_inputs(seed, rows), attended(seed)
            before = [tensor.clone() for tensor in inputs]
            wanted = eager(block, inputs, value)
            got = use(leases, block, inputs, value)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert leases.record.projection_copy_bytes == 0


def test_the_roundings_are_those_of_the_written_formula(leases, blocks):
    """Bitwise with the formula spelled out: float32 gate, one rounding, then bfloat16 steps."""
    inputs, value = some_inputs(), attended()
    projected, residual, normalised = use(leases, blocks[0], inputs, value)
    gated = (inputs.hidden.float() + projected.float() * inputs.gate).bfloat16()
    scaled = (inputs.gain * gated).bfloat16()
    assert torch.equal(residual, (scaled + inputs.shift).bfloat16())
    assert torch.equal(normalised, blocks[0].norm3(residual))


def test_everything_is_captured_before_the_first_lease(leases, blocks, runtime):
    assert leases.record.captures == 2 * len(blocks)
    use(leases, blocks[0])
    use(leases, blocks[0])
    assert leases.record.captures == 2 * len(blocks)
    assert [entry[0] for entry in runtime.log].count("capture") == 0
    assert leases.record.replays == leases.record.producer_writes == 2


def test_graphs_of_a_slot_share_a_pool_and_slots_do_not(blocks, runtime):
    """A graph may overwrite the outputs of another one of its pool, never of the other slot."""
    prepared(blocks, runtime)
    pools = [entry[2] for entry in runtime.log if entry[0] == "capture"]
    assert pools == ["pool 1", "pool 2"] * 2


def test_blocks_share_two_slots_of_buffers(leases, blocks):
    first, second = leases.slots
    assert first.attended.data_ptr() != second.attended.data_ptr()
    seen = []
    for block in (*blocks, *blocks):
        with leases.acquire(block, some_inputs()) as lease:
            seen.append(lease.slot)
            lease.stage(attended())
            lease.finish()
    assert [slot is first for slot in seen] == [True, False, True, False]


def test_staging_copies_counts_and_does_not_alias(leases, blocks):
    value = attended()
    with leases.acquire(blocks[0], some_inputs()) as lease:
        lease.stage(value)
        value.fill_(7.0)
        got = lease.finish().projected.clone()
    assert torch.equal(got, blocks[0].self_attn.o(attended()))
    assert leases.record.projection_copy_bytes == value.nbytes
    copied = sum(tensor.nbytes for tensor in some_inputs())
    assert leases.record.conditioning_copy_bytes == copied


# ---------------------------------------------------------------------------- slots and fences


def test_two_leases_are_apart_and_a_third_waits_for_none(leases, blocks):
    first, second = blocks
    with (
        leases.acquire(first, some_inputs()) as one,
        leases.acquire(second, some_inputs(50)) as two,
    ):
        outputs = []
        for lease, value in ((one, attended()), (two, attended(60))):
            lease.stage(value)
            outputs.append(lease.finish())
        assert len({tensor.data_ptr() for tensors in outputs for tensor in tensors}) == 6
        with pytest.raises(SlotsBusyError, match="both slots still have consumers"):
            use(leases, first)
        assert not leases.record.failed
        wanted = eager(first, some_inputs(), attended())
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], wanted, strict=True))
    use(leases, first)


def test_the_next_use_of_a_slot_waits_for_the_last_one_before_it_writes(leases, blocks, runtime):
    runtime.current = SIDE
    use(leases, blocks[0])
    ended = runtime.log[-1]
    assert ended[0] == "record"
    assert ended[1].stream == "side"
    runtime.current = FakeStream("producer")
    use(leases, blocks[0])  # the other slot, which nobody has read
    assert leases.record.slot_reuse_waits == 0
    runtime.log.clear()
    use(leases, blocks[0])
    assert runtime.log[0] == ("wait", "producer", ended[1])
    assert runtime.log[1][0] == "own"
    assert leases.record.slot_reuse_waits == 1


def test_every_tensor_is_owned_by_the_stream_that_touches_it(leases, blocks, runtime):
    inputs, value = some_inputs(), attended()
    with leases.acquire(blocks[0], inputs) as lease:
        lease.stage(value)
        outputs = lease.finish()
    slot = lease.slot
    copies = [t for pair in zip(inputs, slot.inputs, strict=True) for t in pair]
    owned = (*copies, slot.attended, value, *outputs)
    wanted = [("own", tensor.data_ptr(), "producer") for tensor in owned]
    assert [entry for entry in runtime.log if entry[0] == "own"] == wanted


# ---------------------------------------------------------------------------- order of calls


def test_a_closed_lease_refuses_everything(leases, blocks):
    with leases.acquire(blocks[0], some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
    assert lease.state is LeaseState.CLOSED
    for access in (
        lambda: lease.projection_input, lease.mark_written, lease.finish,
        lambda: lease.stage(attended()),
    ):  # fmt: skip
        with pytest.raises(LeaseError, match="outside its consumer lifetime"):
            access()
    assert not leases.record.failed


def test_a_stale_lease_does_not_reach_the_next_one_of_its_slot(leases, blocks):
    """A second handle keeps the state of its making, when the slot has gone on."""
    with leases.acquire(blocks[0], some_inputs()) as lease:
        stale = copy.copy(lease)
        lease.stage(attended())
        lease.finish()
    use(leases, blocks[0])  # the other slot
    with leases.acquire(blocks[0], some_inputs()) as current:
        assert current.slot is lease.slot
        with pytest.raises(LeaseError, match="outside its consumer lifetime"):
            _ = stale.projection_input
        current.stage(attended())
        current.finish()
    assert not leases.record.failed


# ---------------------------------------------------------------------------- set-up


def test_a_failed_capture_refuses_the_configuration_before_any_session(blocks, runtime):
    runtime.failing = "capture"
    with pytest.raises(ConfigError, match="set lingbot_npu_leased_post_attention to false"):
        prepared(blocks, runtime)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda inputs: (inputs[0], inputs[0].clone(), inputs[0].clone()), "shares memory"),
        (lambda inputs: (inputs[0].clone(), inputs[0].clone()), "three tensors"),
        (lambda inputs: tuple(inputs[0].clone().float() for _ in range(3)), "three tensors"),
    ],
)
def test_outputs_that_cannot_be_borrowed_are_refused(blocks, runtime, outputs, message):
    runtime.outputs = outputs
    with pytest.raises(ConfigError, match=f"{message}.*leased_post_attention to false"):
        prepared(blocks, runtime)


def test_a_session_of_another_size_is_counted_once(leases):
    leases.begin_session(TOKENS)
    assert leases.record.fallbacks == 0
    leases.begin_session(TOKENS + 3)
    assert leases.record.fallbacks == 1


def test_inputs_of_another_size_touch_nothing(leases, blocks, runtime):
    wide = LeaseInputs(*(torch.cat([t, t]) if len(t) > 1 else t for t in some_inputs()))
    with pytest.raises(LeaseError, match="no graphs were prepared"):
        use(leases, blocks[0], inputs=wide)
    assert runtime.log == []
    assert not leases.record.failed


@pytest.mark.parametrize("wrong", range(4))
def test_inputs_of_another_dtype_touch_nothing(leases, blocks, runtime, wrong):
    tensors = list(some_inputs())
    tensors[wrong] = tensors[wrong].half()
    # Shape checks of the test run refuse the object itself; without them the lease does.
    with pytest.raises((LeaseError, TypeError)):
        use(leases, blocks[0], inputs=LeaseInputs(*tensors))
    assert runtime.log == []
    assert not leases.record.failed


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"dtype": torch.float32}, "needs an unquantised bfloat16 projection"),
        ({"linear": Int8LinearMethod(Int8Ops(), fractal=True)}, "as the checkpoint has"),
        ({"tensor_parallel": RankGroup(0, 2, None)}, "tensor_parallel_size 1"),
    ],
)  # fmt: skip
def test_projections_that_cannot_be_captured_are_refused(runtime, parts, message):
    with torch.inference_mode(mode=False):
        block = random_block(tiny_parts(**parts))
    with pytest.raises(ConfigError, match=message):
        prepared([block], runtime)
