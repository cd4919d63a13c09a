"""Places, line and order of chunks."""

import pytest

from tests.helpers.fake_executor import make_request
from vllm_omni.diffusion.messages import WorkerReady
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import (
    EngineSession,
    SessionEvent,
    SessionOptions,
    SessionStatus,
    Waiting,
)
from vllm_omni.errors import InternalError, ServerFullError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def make_scheduler(*, max_sessions: int, max_queued: int, num_pages: int = 100) -> Scheduler:
    """With places, and with pages of which a 64x96 session takes two."""
    scheduler = Scheduler(max_queued=max_queued)
    scheduler.adopt(
        WorkerReady(max_sessions, num_pages, page_tokens=128, page_bytes=1024, window_frames=9)
    )
    return scheduler


def make_session(
    name: str,
    *,
    now_s: float = 0.0,
    fps: float = 12.0,
    lead_ms: float | None = None,
    live: bool = False,
    **changes: object,
) -> tuple[EngineSession, list[SessionEvent]]:
    events: list[SessionEvent] = []
    session = EngineSession(
        name,
        make_request(fps=fps, num_chunks=None, **changes),
        events.append,
        options=SessionOptions(max_lead_ms=lead_ms, live=live),
        now_s=now_s,
    )
    return session, events


def placed(scheduler: Scheduler, *sessions: EngineSession) -> None:
    for session in sessions:
        scheduler.enqueue(session)
        scheduler.place(session)
        session.move_to(SessionStatus.OPEN)


def test_places_are_given_in_order_of_arrival():
    scheduler = make_scheduler(max_sessions=1, max_queued=2)
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
    scheduler = make_scheduler(max_sessions=1, max_queued=3)
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
    scheduler = make_scheduler(max_sessions=1, max_queued=1)
    placed(scheduler, make_session("a")[0])
    scheduler.enqueue(make_session("b")[0])
    with pytest.raises(ServerFullError, match=r"1 of 1 sessions run and 1 of 1 wait"):
        scheduler.enqueue(make_session("c")[0])


def test_only_those_who_have_to_wait_count_as_waiting():
    scheduler = make_scheduler(max_sessions=2, max_queued=1)
    for name in "abc":
        scheduler.enqueue(make_session(name)[0])
    with pytest.raises(ServerFullError, match="1 of 1 wait"):
        scheduler.enqueue(make_session("d")[0])


def test_without_a_group_everybody_waits():
    scheduler = Scheduler(max_queued=1)
    session, events = make_session("a")
    scheduler.enqueue(session)
    scheduler.announce_positions()
    assert scheduler.next_to_place() is None
    assert events == [Waiting(1)]
    with pytest.raises(ServerFullError):
        scheduler.enqueue(make_session("b")[0])


class TestPages:
    """Of 6 pages a 64x96 session takes 2, a 128x96 one 4."""

    def test_a_head_for_which_pages_are_missing_waits_and_is_told(self):
        scheduler = make_scheduler(max_sessions=3, max_queued=2, num_pages=6)
        large, events = make_session("large", height=128)
        placed(scheduler, make_session("a")[0], first := make_session("b")[0])
        scheduler.enqueue(large)
        scheduler.announce_positions()
        assert scheduler.next_to_place() is None
        assert events == [Waiting(1)]
        scheduler.remove(first)
        assert scheduler.next_to_place() is large

    def test_nobody_passes_the_head(self):
        scheduler = make_scheduler(max_sessions=3, max_queued=2, num_pages=6)
        placed(scheduler, make_session("a", height=128)[0])
        scheduler.enqueue(make_session("large", height=128)[0])
        small, events = make_session("small")
        scheduler.enqueue(small)
        scheduler.announce_positions()
        assert scheduler.next_to_place() is None
        assert events == [Waiting(2)]

    def test_those_who_wait_for_pages_fill_the_line(self):
        scheduler = make_scheduler(max_sessions=3, max_queued=1, num_pages=6)
        placed(scheduler, make_session("a", height=128)[0])
        scheduler.enqueue(make_session("large", height=128)[0])
        with pytest.raises(ServerFullError, match="1 of 3 sessions run and 1 of 1 wait"):
            scheduler.enqueue(make_session("small")[0])

    def test_a_refused_head_is_tried_again_when_a_place_is_given_up(self):
        scheduler = make_scheduler(max_sessions=3, max_queued=2, num_pages=6)
        placed(scheduler, running := make_session("a")[0])
        refused, events = make_session("b")
        scheduler.enqueue(refused)
        scheduler.enqueue(behind := make_session("c")[0])
        scheduler.refused(refused)
        scheduler.announce_positions()
        assert scheduler.next_to_place() is None
        assert events == [Waiting(1)]
        scheduler.remove(behind)
        assert scheduler.next_to_place() is None
        scheduler.remove(running)
        assert scheduler.next_to_place() is refused

    def test_a_refused_head_that_leaves_holds_nobody_back(self):
        scheduler = make_scheduler(max_sessions=3, max_queued=2, num_pages=6)
        placed(scheduler, make_session("a")[0])
        refused, behind = make_session("b")[0], make_session("c")[0]
        scheduler.enqueue(refused)
        scheduler.enqueue(behind)
        scheduler.refused(refused)
        scheduler.remove(refused)
        assert scheduler.next_to_place() is behind


def test_no_line_still_admits_up_to_the_places():
    scheduler = make_scheduler(max_sessions=2, max_queued=0)
    scheduler.enqueue(make_session("a")[0])
    scheduler.enqueue(make_session("b")[0])
    with pytest.raises(ServerFullError):
        scheduler.enqueue(make_session("c")[0])


def test_earliest_playback_deadline_goes_first():
    scheduler = make_scheduler(max_sessions=2, max_queued=0)
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
    scheduler = make_scheduler(max_sessions=1, max_queued=0)
    session, _ = make_session("a")
    placed(scheduler, session)
    session.chunk_made(1.0)
    session.chunk_made(1.0)
    assert scheduler.pick(5.0) is None
    assert scheduler.wake_at_s() is None
    session.undelivered -= 1
    assert scheduler.pick(5.0) is session


def test_max_lead_holds_a_session_back_until_playback_catches_up():
    scheduler = make_scheduler(max_sessions=1, max_queued=0)
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
    with pytest.raises(InternalError, match=f"cannot go from waiting to {target}"):
        session.move_to(target)


def test_closed_is_final():
    session, _ = make_session("a")
    session.move_to(SessionStatus.CLOSED)
    for status in SessionStatus:
        with pytest.raises(InternalError):
            session.move_to(status)


class TestLateness:
    """9 frames at 12 fps play until 1.75 s, 12 more until 2.75 s."""

    def playing(self, **options: object) -> EngineSession:
        scheduler = make_scheduler(max_sessions=1, max_queued=0)
        session, _ = make_session("a", **{"live": True, **options})
        placed(scheduler, session)
        session.chunk_made(1.0)
        return session

    def test_a_chunk_after_its_deadline_keeps_a_viewer_waiting(self):
        session = self.playing()
        assert not session.keeps_waiting(1.75)
        assert session.keeps_waiting(1.76)

    def test_a_server_that_is_always_slow_is_late_each_time(self):
        session = self.playing()
        for ready_s in (2.0, 3.0, 4.0):
            session.delivered(ready_s)
            assert session.keeps_waiting(ready_s)
            session.chunk_made(ready_s)

    def test_nobody_waits_for_a_job(self):
        assert not self.playing(live=False).keeps_waiting(9.0)

    def test_a_client_that_reads_late_delays_itself_and_is_no_debt(self):
        session = self.playing()
        session.chunk_made(1.1)
        assert session.is_paused
        session.delivered(60.0)
        assert session.deadline_s == pytest.approx(60.0)
        assert not session.keeps_waiting(61.0)
        session.chunk_made(61.0)
        session.undelivered = 0
        # From here on the server can be late again: the next chunk is due 12 frames later.
        assert session.deadline_s == pytest.approx(61.0)
        assert session.keeps_waiting(61.5)

    def test_a_pause_that_ends_in_time_excuses_nothing(self):
        session = self.playing()
        session.chunk_made(1.1)
        session.delivered(1.5)
        assert session.deadline_s == pytest.approx(2.75)
        assert session.keeps_waiting(2.8)

    def test_a_client_that_allows_no_lead_gets_what_it_asked_for(self):
        assert not self.playing(lead_ms=0.0).keeps_waiting(9.0)
        assert self.playing(lead_ms=250.0).keeps_waiting(9.0)
