"""Places, line and order of chunks."""

import pytest

from tests.helpers.fake_executor import make_request
from vllm_omni.engine.interactions import InteractionBox
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import (
    EngineSession,
    SessionEvent,
    SessionOptions,
    SessionStatus,
    Waiting,
)
from vllm_omni.errors import ServerFullError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def make_session(
    name: str, *, now_s: float = 0.0, fps: float = 12.0, lead_ms: float | None = None
) -> tuple[EngineSession, list[SessionEvent]]:
    events: list[SessionEvent] = []
    session = EngineSession(
        name,
        make_request(fps=fps, num_chunks=None),
        events.append,
        options=SessionOptions(max_lead_ms=lead_ms),
        interactions=InteractionBox("p", live_camera=True, opened_s=now_s),
        now_s=now_s,
    )
    return session, events


def placed(scheduler: Scheduler, *sessions: EngineSession) -> None:
    for session in sessions:
        scheduler.enqueue(session)
        scheduler.place(session)
        session.move_to(SessionStatus.OPEN)


def test_places_are_given_in_order_of_arrival():
    scheduler = Scheduler(max_sessions=1, max_queued=2)
    first, _ = make_session("a")
    second, _ = make_session("b")
    scheduler.enqueue(first)
    scheduler.enqueue(second)
    assert scheduler.next_to_place() is first
    scheduler.place(first)
    assert scheduler.next_to_place() is None
    scheduler.remove(first)
    assert scheduler.next_to_place() is second


def test_positions_follow_the_line():
    scheduler = Scheduler(max_sessions=1, max_queued=3)
    sessions = [make_session(name) for name in "abc"]
    for session, _ in sessions:
        scheduler.enqueue(session)
    scheduler.place(sessions[0][0])
    scheduler.announce_positions()
    scheduler.remove(sessions[1][0])
    scheduler.announce_positions()
    assert sessions[1][1] == [Waiting(1)]
    assert sessions[2][1] == [Waiting(2), Waiting(1)]


def test_a_full_line_refuses_with_numbers():
    scheduler = Scheduler(max_sessions=1, max_queued=1)
    placed(scheduler, make_session("a")[0])
    scheduler.enqueue(make_session("b")[0])
    with pytest.raises(ServerFullError, match=r"1 of 1 sessions run and 1 of 1 wait"):
        scheduler.enqueue(make_session("c")[0])


def test_no_line_still_admits_up_to_the_places():
    scheduler = Scheduler(max_sessions=2, max_queued=0)
    scheduler.enqueue(make_session("a")[0])
    scheduler.enqueue(make_session("b")[0])
    with pytest.raises(ServerFullError):
        scheduler.enqueue(make_session("c")[0])


def test_earliest_playback_deadline_goes_first():
    scheduler = Scheduler(max_sessions=2, max_queued=0)
    ahead, _ = make_session("ahead", now_s=0.0)
    behind, _ = make_session("behind", now_s=0.1)
    placed(scheduler, ahead, behind)
    assert scheduler.pick(1.0) is ahead
    ahead.chunk_made(1.0)
    ahead.undelivered = 0
    # 9 frames at 12 fps play until 1.75; the other has shown nothing yet.
    assert ahead.deadline_s == pytest.approx(1.75)
    assert scheduler.pick(1.0) is behind
    behind.chunk_made(1.5)
    behind.undelivered = 0
    assert scheduler.pick(1.5) is ahead


def test_a_client_that_does_not_read_is_not_scheduled():
    scheduler = Scheduler(max_sessions=1, max_queued=0)
    session, _ = make_session("a")
    placed(scheduler, session)
    session.chunk_made(1.0)
    session.chunk_made(1.0)
    assert scheduler.pick(5.0) is None
    assert scheduler.wake_at_s() is None
    session.undelivered -= 1
    assert scheduler.pick(5.0) is session


def test_max_lead_holds_a_session_back_until_playback_catches_up():
    scheduler = Scheduler(max_sessions=1, max_queued=0)
    session, _ = make_session("a", lead_ms=250.0)
    placed(scheduler, session)
    assert scheduler.pick(0.0) is session
    session.chunk_made(1.0)
    session.undelivered = 0
    # The next chunk is due at 1.75 and may be made from 1.5 on.
    assert scheduler.pick(1.49) is None
    assert scheduler.wake_at_s() == pytest.approx(1.5)
    assert scheduler.pick(1.5) is session


@pytest.mark.parametrize("target", [SessionStatus.RUNNING, SessionStatus.WAITING])
def test_illegal_status_changes_are_refused(target: SessionStatus):
    session, _ = make_session("a")
    with pytest.raises(RuntimeError, match=f"cannot go from waiting to {target}"):
        session.move_to(target)


def test_closed_is_final():
    session, _ = make_session("a")
    session.move_to(SessionStatus.CLOSED)
    for status in SessionStatus:
        with pytest.raises(RuntimeError):
            session.move_to(status)
