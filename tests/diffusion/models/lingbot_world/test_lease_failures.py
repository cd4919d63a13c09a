"""What misuse of a lease and failures inside one leave behind; the runtime is a fake."""

import pytest

from tests.helpers.leases import (
    SIDE,
    attended,
    blocks,
    inference,
    leases,
    quarantine,
    runtime,
    some_inputs,
    use,
)
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseInputs
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import LeaseError
from vllm_omni.errors import WorkerFailedError

__all__ = ["blocks", "inference", "leases", "quarantine", "runtime"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


MISUSES = {
    "finish before it is written": lambda lease, _: lease.finish(),
    "written twice": lambda lease, _: (lease.mark_written(), lease.mark_written()),
    "finished twice": lambda lease, _: (lease.mark_written(), lease.finish(), lease.finish()),
    "input after the replay": lambda lease, _: (
        lease.mark_written(), lease.finish(), lease.projection_input,
    ),
    "staged twice": lambda lease, _: (lease.stage(attended()), lease.stage(attended())),
    "another stream writes": lambda lease, runtime: (move(runtime), lease.mark_written()),
    "another stream replays": lambda lease, runtime: (
        lease.mark_written(), move(runtime), lease.finish(),
    ),
    "another stream reads": lambda lease, runtime: (
        lease.mark_written(), lease.finish(), move(runtime),
    ),
    "left without a replay": lambda lease, _: lease.mark_written(),
    "left untouched": lambda *_: None,
}  # fmt: skip


def move(runtime):
    runtime.current = SIDE


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_inside_a_lease_poisons_the_controller(leases, blocks, runtime, quarantine, misuse):
    with pytest.raises(LeaseError), leases.acquire(blocks[0], some_inputs()) as lease:
        MISUSES[misuse](lease, runtime)
    assert leases.record.failed
    assert quarantine.size == 1
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        use(leases, blocks[0])
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        leases.begin_session(leases.size.tokens)


class CallersOwn(BaseException):
    pass


def fail_in_replay(leases, block, runtime):
    runtime.failing = "replay"
    use(leases, block)


def fail_in_completion(leases, block, runtime):
    with leases.acquire(block, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
        runtime.failing = "record_event"


def fail_in_producer(leases, block, _):
    with leases.acquire(block, some_inputs()):
        raise RuntimeError("injected producer failure")


def fail_in_consumer(leases, block, _):
    with leases.acquire(block, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
        raise CallersOwn("injected consumer failure")


@pytest.mark.parametrize(
    "failure", [fail_in_replay, fail_in_completion, fail_in_producer, fail_in_consumer]
)
def test_a_failure_is_passed_on_unchanged_and_nothing_is_released(
    leases, blocks, runtime, quarantine, failure
):
    block = blocks[0]
    with pytest.raises(BaseException, match="injected") as caught:
        failure(leases, block, runtime)
    assert type(caught.value) in {RuntimeError, CallersOwn}
    assert leases.record.failed
    (active,) = [slot for slot in leases.slots if slot.active]
    (held,) = quarantine.held
    assert "injected" in held.reason
    for kept in (leases, block, active, block.self_attn.parts.exchange):
        assert any(owner is kept for owner in held.owners)
    assert any(isinstance(owner, LeaseInputs) for owner in held.owners)
    assert leases.record.fallbacks == 0
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        use(leases, block)


def test_two_leases_that_fail_together_are_both_kept(leases, blocks, quarantine):
    first, second = blocks
    with (
        pytest.raises(CallersOwn, match="injected"),
        leases.acquire(first, some_inputs()) as one,
        leases.acquire(second, some_inputs(50)) as two,
    ):
        raise CallersOwn("injected failure")
    kept = [owner for held in quarantine.held for owner in held.owners]
    assert all(any(owner is lease for owner in kept) for lease in (one, two))
