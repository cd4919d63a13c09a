"""Memory that a device may still touch is kept: until it has passed an event, or for ever."""

import pytest
import torch

from vllm_omni.platforms.quarantine import (
    MOST_UNFINISHED,
    Quarantine,
    StalledTransferError,
    TransferOwners,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_owners_are_kept_until_the_device_has_passed_them():
    events: list[FakeEvent] = []

    def record() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    owners = TransferOwners(record)
    for _ in range(3):
        with owners.kept([torch.zeros(1)]):
            pass
    assert len(owners.unfinished) == 3
    events[0].passed = events[2].passed = True
    with owners.kept([torch.zeros(1)]):
        pass
    assert [event for event, _ in owners.unfinished] == [events[1], events[3]]


def test_a_device_without_progress_is_an_error():
    owners = TransferOwners(FakeEvent)
    for _ in range(MOST_UNFINISHED):
        with owners.kept([]):
            pass
    with pytest.raises(StalledTransferError, match="32 pixel exchanges"), owners.kept([]):
        pass


def fail(quarantine, *owners):
    with quarantine.joined_by("from further out"):
        error = RuntimeError("the link is down")
        quarantine.hold("an exchange", error, *owners)
        raise error


def test_what_a_failure_holds_is_joined_by_what_callers_know_of():
    quarantine, memory = Quarantine(), object()
    with pytest.raises(RuntimeError, match="the link is down"):
        fail(quarantine, memory)
    (held,) = quarantine.held
    assert held.owners == [memory, "from further out"]
    assert (held.origin, held.reason) == ("an exchange", "RuntimeError: the link is down")
    assert quarantine.size == 1


def test_errors_that_hold_nothing_keep_nothing():
    quarantine = Quarantine()
    with quarantine.joined_by("memory"):
        pass
    with pytest.raises(ValueError, match="unrelated"), quarantine.joined_by("memory"):
        raise ValueError("unrelated")
    assert quarantine.size == 0


def test_an_earlier_failure_is_not_joined_by_a_later_chunk():
    quarantine = Quarantine()
    quarantine.hold("earlier", RuntimeError("earlier"))
    with pytest.raises(RuntimeError, match="the link is down"):
        fail(quarantine)
    assert [held.owners for held in quarantine.held] == [[], ["from further out"]]
