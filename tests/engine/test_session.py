"""One session: its status, and whether a viewer was kept waiting."""

import pytest

from tests.helpers.engine_bench import make_session
from vllm_omni.engine.session import EngineSession, SessionStatus
from vllm_omni.errors import InternalError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize("target", [SessionStatus.RUNNING, SessionStatus.WAITING])
def test_illegal_status_changes_are_refused(target: SessionStatus):
    session = make_session("a")
    with pytest.raises(InternalError, match=f"cannot go from waiting to {target}"):
        session.move_to(target)


def test_closed_is_final():
    session = make_session("a")
    session.move_to(SessionStatus.CLOSED)
    for status in SessionStatus:
        with pytest.raises(InternalError):
            session.move_to(status)


class TestLateness:
    """9 frames at 12 fps play until 1.75 s, 12 more until 2.75 s."""

    def playing(self, **options: object) -> EngineSession:
        session = make_session("a", **{"live": True, **options})
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
