"""What misuse of a lease and failures inside one leave behind; the runtime is a fake."""

import pytest

from tests.helpers.leases import (
    SIDE,
    SIZE,
    attended,
    inference,
    leases,
    new_blocks,
    quarantine,
    runtime,
    some_inputs,
    use,
)
from vllm_omni.diffusion.models.lingbot_world.lease import LeaseError, LeaseInputs
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    LeasedPostAttention,
    asking_for_restart,
)
from vllm_omni.errors import WorkerFailedError

__all__ = ["inference", "leases", "quarantine", "runtime"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


MISUSES = {
    "finish before it is written": lambda lease, _: lease.finish(),
    "consume before the replay": lambda lease, _: lease.consume(),
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
    "left without a replay": lambda lease, _: lease.mark_written(),
    "left untouched": lambda *_: None,
}  # fmt: skip


def move(runtime):
    runtime.current = SIDE


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_inside_a_lease_poisons_the_controller(leases, runtime, quarantine, misuse):
    with pytest.raises(LeaseError), leases.acquire(0, some_inputs()) as lease:
        MISUSES[misuse](lease, runtime)
    assert leases.failed
    assert len(quarantine.held) == 1
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        use(leases)


class CallersOwn(BaseException):
    pass


def fail_in_replay(leases, runtime):
    runtime.failing = "replay"
    use(leases)


def fail_in_completion(leases, runtime):
    with leases.acquire(0, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
        runtime.failing = "record_event"


def fail_in_producer(leases, _):
    with leases.acquire(0, some_inputs()):
        raise RuntimeError("injected producer failure")


def fail_in_consumer(leases, _):
    with leases.acquire(0, some_inputs()) as lease:
        lease.stage(attended())
        lease.finish()
        raise CallersOwn("injected consumer failure")


@pytest.mark.parametrize(
    "failure", [fail_in_replay, fail_in_completion, fail_in_producer, fail_in_consumer]
)
def test_a_failure_is_passed_on_unchanged_and_nothing_is_released(
    leases, runtime, quarantine, failure
):
    with pytest.raises(BaseException, match="injected") as caught:
        failure(leases, runtime)
    assert type(caught.value) in {RuntimeError, CallersOwn}
    assert leases.failed
    (active,) = [slot for slot in leases.slots(SIZE) if slot.active]
    (held,) = quarantine.held
    assert "injected" in held.reason
    assert any(owner is active for owner in held.owners)
    assert any(isinstance(owner, LeaseInputs) for owner in held.owners)
    assert leases.quarantine == [held.owners]
    assert leases.counters.fallbacks == 0
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        use(leases)


def test_two_leases_that_fail_together_are_kept_and_reported_once(leases, quarantine):
    failed = pytest.raises(CallersOwn, match="injected")
    with failed, leases.acquire(0, some_inputs()) as one, leases.acquire(1, some_inputs(50)) as two:
        raise CallersOwn("injected failure")
    assert len(quarantine.held) == 1
    kept = [owner for owners in leases.quarantine for owner in owners]
    assert all(any(owner is lease for owner in kept) for lease in (one, two))


def test_the_worker_asks_for_a_restart_after_a_failed_lease(leases, runtime, quarantine):
    failed = pytest.raises(WorkerFailedError, match="have to be restarted")
    with failed as caught, asking_for_restart(leases):
        fail_in_replay(leases, runtime)
    assert str(caught.value.__cause__) == "injected replay failure"
    with pytest.raises(CallersOwn), asking_for_restart(leases, "of the chunk"):
        raise CallersOwn
    assert leases.quarantine[-1] == ("of the chunk",)
    (held,) = quarantine.held  # reported once, and the report holds the controller
    assert any(owner is leases for owner in held.owners)
    for healthy in (None, LeasedPostAttention(new_blocks(), runtime)):
        with pytest.raises(ValueError, match="unrelated"), asking_for_restart(healthy):
            raise ValueError("unrelated")
