"""Leases of post-attention graphs: what they compute, their fences and their set-up.

The runtime is a fake that calls instead of replaying, so equalities are bitwise.
"""

import copy

import pytest
import torch

from tests.helpers.blocks import random_block, tiny_parts
from tests.helpers.leases import (
    CPU,
    DIM,
    OTHER,
    SIDE,
    SIZE,
    TOKENS,
    attended,
    eager,
    inference,
    leases,
    new_blocks,
    quarantine,
    runtime,
    some_inputs,
    use,
)
from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.diffusion.models.lingbot_world.lease import (
    LeaseError,
    LeaseInputs,
    LeaseSignature,
    LeaseState,
    SlotsBusyError,
)
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    LeasedPostAttention,
    LeaseOptions,
)
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.int8 import ReferenceInt8Ops

__all__ = ["inference", "leases", "quarantine", "runtime"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("rows", [1, 3])
def test_a_lease_gives_the_bytes_of_the_modules_and_leaves_its_inputs_alone(leases, rows):
    leases.prepare(LeaseSignature(TOKENS, DIM, rows, CPU))
    for layer in (0, 1):
        for seed in (1, 40, 80):  # both slots, and the first one again
            inputs, value = some_inputs(seed, rows), attended(seed)
            before = [tensor.clone() for tensor in inputs.tensors]
            wanted = eager(leases, layer, inputs, value)
            got = use(leases, layer, inputs, value)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(inputs.tensors, before, strict=True))
    assert leases.counters.output_clone_bytes == leases.counters.projection_copy_bytes == 0


def test_the_roundings_are_those_of_the_written_formula(leases):
    """Bitwise with the formula spelled out: float32 gate, one rounding, then bfloat16 steps."""
    inputs, value = some_inputs(), attended()
    block = leases.blocks[0]
    projected, residual, normalised = use(leases, 0, inputs, value)
    gated = (inputs.hidden.float() + projected.float() * inputs.gate).bfloat16()
    scaled = (inputs.gain * gated).bfloat16()
    assert torch.equal(residual, (scaled + inputs.shift).bfloat16())
    assert torch.equal(normalised, block.norm3(residual))


def test_everything_is_captured_before_the_first_lease(leases, runtime):
    assert leases.counters.captures == 2 * len(leases.blocks)
    use(leases)
    use(leases)
    assert leases.counters.captures == 2 * len(leases.blocks)
    assert [entry[0] for entry in runtime.log].count("capture") == 0
    assert leases.counters.replays == leases.counters.producer_writes == 2


def test_graphs_of_a_slot_share_a_pool_and_slots_do_not(runtime):
    """A graph may overwrite the outputs of another one of its pool, never of the other slot."""
    LeasedPostAttention(new_blocks(), runtime).prepare(SIZE)
    pools = [entry[2] for entry in runtime.log if entry[0] == "capture"]
    assert pools == ["pool 1", "pool 2"] * 2


def test_blocks_share_two_slots_of_buffers(leases):
    first, second = leases.slots(SIZE)
    assert len(first.captures) == len(second.captures) == len(leases.blocks)
    assert first.attended.data_ptr() != second.attended.data_ptr()
    seen = []
    for layer in (0, 1, 0, 1):
        with leases.acquire(layer, some_inputs()) as lease:
            seen.append(lease.slot)
            lease.stage(attended())
            lease.finish()
    assert [slot is first for slot in seen] == [True, False, True, False]


def test_staging_copies_counts_and_does_not_alias(leases):
    value = attended()
    with leases.acquire(0, some_inputs()) as lease:
        lease.stage(value)
        value.fill_(7.0)
        got = lease.finish().projected.clone()
    assert torch.equal(got, leases.blocks[0].self_attn.o(attended()))
    assert leases.counters.projection_copy_bytes == value.nbytes
    copied = sum(tensor.nbytes for tensor in some_inputs().tensors)
    assert leases.counters.conditioning_copy_bytes == copied


# ---------------------------------------------------------------------------- slots and fences


def test_two_leases_are_apart_and_a_third_waits_for_none(leases):
    with leases.acquire(0, some_inputs()) as one, leases.acquire(1, some_inputs(50)) as two:
        for lease, value in ((one, attended()), (two, attended(60))):
            lease.stage(value)
            lease.finish()
        pointers = [t.data_ptr() for lease in (one, two) for t in lease.consume().tensors]
        assert len(set(pointers)) == 6
        with pytest.raises(SlotsBusyError, match="both slots still have consumers"):
            use(leases)
        assert not leases.failed
        wanted = eager(leases, 0, some_inputs(), attended())
        assert all(torch.equal(a, b) for a, b in zip(one.consume().tensors, wanted, strict=True))
    use(leases)


def test_each_consumer_waits_once_and_the_next_use_waits_for_all_before_it_writes(leases, runtime):
    with leases.acquire(0, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
        ready = runtime.log[-1][1]
        for stream in (SIDE, OTHER, SIDE, runtime.current):
            lease.consume(stream)
    waits = [entry for entry in runtime.log if entry[0] == "wait"]
    assert waits == [("wait", "side", ready), ("wait", "other", ready)]
    assert leases.counters.consumer_fences == 2
    completion = [entry[1] for entry in runtime.log if entry[0] == "record"][1:]
    assert [event.stream for event in completion] == ["producer", "side", "other"]
    use(leases)  # the other slot, which nobody has read
    runtime.log.clear()
    use(leases)
    assert runtime.log[:3] == [("wait", "producer", event) for event in completion]
    assert runtime.log[3][0] == "own"
    assert leases.counters.slot_reuse_waits == 3


def test_every_tensor_is_owned_by_each_stream_that_touches_it(leases, runtime):
    inputs, value = some_inputs(), attended()
    with leases.acquire(0, inputs) as lease:
        lease.stage(value)
        outputs = lease.finish().tensors
        lease.consume(SIDE)
    slot = lease.slot
    copies = [t for pair in zip(inputs.tensors, slot.inputs.tensors, strict=True) for t in pair]
    owned = [(tensor, "producer") for tensor in (*copies, slot.attended, value, *outputs)]
    owned += [(tensor, "side") for tensor in outputs]
    wanted = [("own", tensor.data_ptr(), stream) for tensor, stream in owned]
    assert [entry for entry in runtime.log if entry[0] == "own"] == wanted


# ---------------------------------------------------------------------------- order of calls


def test_a_closed_lease_refuses_everything(leases):
    with leases.acquire(0, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
    assert lease.state is LeaseState.CLOSED
    for access in (
        lambda: lease.projection_input, lease.mark_written, lease.finish, lease.consume,
        lambda: lease.stage(attended()),
    ):  # fmt: skip
        with pytest.raises(LeaseError, match="outside its consumer lifetime"):
            access()
    assert not leases.failed


def test_a_stale_lease_does_not_reach_the_next_one_of_its_slot(leases):
    """A second handle keeps the state of its making, when the slot has gone on."""
    with leases.acquire(0, some_inputs()) as lease:
        stale_open = copy.copy(lease)
        lease.stage(attended())
        lease.finish()
        stale_finished = copy.copy(lease)
    accesses = (lambda: stale_open.projection_input, stale_finished.consume)
    with pytest.raises(LeaseError, match="outside its consumer lifetime"):
        stale_finished.consume()
    use(leases)  # the other slot
    with leases.acquire(0, some_inputs()) as current:
        assert current.slot is lease.slot
        for access in accesses:
            with pytest.raises(LeaseError, match="outside its consumer lifetime"):
                access()
        current.stage(attended())
        current.finish()
    assert not leases.failed


# ---------------------------------------------------------------------------- set-up


def test_a_failed_capture_refuses_the_configuration_before_any_session(runtime):
    leases = LeasedPostAttention(new_blocks(), runtime)
    runtime.failing = "capture"
    with pytest.raises(ConfigError, match="set lingbot_npu_leased_post_attention to false"):
        leases.prepare(SIZE)
    assert not leases.decide(SIZE)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda inputs: (inputs[0], inputs[0].clone(), inputs[0].clone()), "shares memory"),
        (lambda inputs: (inputs[0].clone(), inputs[0].clone()), "three tensors"),
        (lambda inputs: tuple(inputs[0].clone().float() for _ in range(3)), "three tensors"),
    ],
)
def test_outputs_that_cannot_be_borrowed_are_refused(runtime, outputs, message):
    runtime.outputs = outputs
    with pytest.raises(ConfigError, match=f"{message}.*leased_post_attention to false"):
        LeasedPostAttention(new_blocks(), runtime).prepare(SIZE)


def test_a_session_decides_once_by_its_size(leases, runtime):
    assert leases.decide(SIZE)
    assert not leases.decide(LeaseSignature(TOKENS + 3, DIM, 1, CPU))
    assert leases.counters.fallbacks == 1
    runtime.capturing = True
    assert not leases.decide(SIZE)
    assert leases.counters.fallbacks == 2


def test_inputs_of_another_size_touch_nothing(leases, runtime):
    wide = LeaseInputs(*(torch.cat([t, t]) if len(t) > 1 else t for t in some_inputs().tensors))
    with pytest.raises(LeaseError, match="no graphs were prepared"):
        use(leases, inputs=wide)
    assert runtime.log == []
    assert not leases.failed


@pytest.mark.parametrize("wrong", range(4))
def test_inputs_of_another_dtype_touch_nothing(leases, runtime, wrong):
    tensors = list(some_inputs().tensors)
    tensors[wrong] = tensors[wrong].half()
    # Shape checks of the test run refuse the object itself; without them the lease does.
    with pytest.raises((LeaseError, TypeError)):
        use(leases, inputs=LeaseInputs(*tensors))
    assert runtime.log == []
    assert not leases.failed


def test_sizes_are_limited_and_kept(runtime):
    leases = LeasedPostAttention(new_blocks(), runtime, LeaseOptions(max_signatures=1))
    leases.prepare(SIZE)
    leases.prepare(SIZE)
    with pytest.raises(ConfigError, match="take 1 sizes"):
        leases.prepare(LeaseSignature(TOKENS + 3, DIM, 1, CPU))
    assert leases.decide(SIZE)
    with pytest.raises(ConfigError, match="divide the tokens"):
        LeasedPostAttention(new_blocks(), runtime).prepare(LeaseSignature(TOKENS, DIM, 4, CPU))
    for limit in (0, True):
        with pytest.raises(ConfigError, match="at least 1"):
            LeaseOptions(max_signatures=limit)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"dtype": torch.float32}, "needs an unquantised bfloat16 projection"),
        ({"linear": Int8LinearMethod(ReferenceInt8Ops(), fractal=True)}, "as the checkpoint has"),
        ({"tensor_parallel": RankGroup(0, 2, None)}, "tensor_parallel_size 1"),
    ],
)  # fmt: skip
def test_projections_that_cannot_be_captured_are_refused(runtime, parts, message):
    with torch.inference_mode(mode=False):
        block = random_block(tiny_parts(**parts))
    with pytest.raises(ConfigError, match=message):
        LeasedPostAttention([block], runtime)
