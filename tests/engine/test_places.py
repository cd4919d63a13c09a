"""Places and pages of a worker group, and whose chunk is next; with a clock of the test's own."""

import pytest

from tests.helpers.engine_bench import make_session
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.engine.places import Fleet, Places
from vllm_omni.engine.session import EngineSession, SessionStatus
from vllm_omni.errors import OutOfKVMemoryError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def make_places(max_sessions: int, num_pages: int = 100) -> Places:
    """Places, and pages of which a 64x96 session takes two and a 128x96 one four."""
    places = Places()
    places.offer(
        GroupCapacity(max_sessions, num_pages, page_tokens=128, page_bytes=1024, window_frames=9)
    )
    return places


def place(places: Places, *sessions: EngineSession) -> None:
    for session in sessions:
        places.take(session)
        session.move_to(SessionStatus.OPENING)
        session.move_to(SessionStatus.OPEN)


def placeable(line: list[EngineSession], places: Places) -> int:
    fleet = Fleet()
    fleet._replicas[0] = places
    return fleet.num_placeable(line)


def test_without_a_group_nobody_is_placeable_and_everything_may_fit():
    places = Places()
    places.check_fits(VideoGeometry(4096, 4096))
    assert placeable([make_session("a")], places) == 0
    assert (places.max_sessions, places.held_bytes) == (0, 0)


def test_places_bound_the_head_of_the_line():
    places = make_places(2)
    line = [make_session(name) for name in "abc"]
    assert placeable(line, places) == 2
    place(places, line[0])
    assert placeable(line[1:], places) == 1
    places.give_up(line[0])
    assert placeable(line[1:], places) == 2
    assert placeable([], places) == 0


def test_a_lost_group_is_remembered_by_its_places_alone():
    places = make_places(2)
    place(places, session := make_session("a"))
    assert places.held_bytes == 2 * 1024
    places.offer(None)
    assert (places.max_sessions, places.held_bytes) == (2, 0)
    assert list(places) == [session]
    assert places.find("a") is session
    assert placeable([make_session("b")], places) == 0


class TestPages:
    """Of 6 pages a 64x96 session takes 2, a 128x96 one 4."""

    def test_a_head_for_which_pages_are_missing_waits(self):
        places, large = make_places(3, num_pages=6), make_session("large", height=128)
        place(places, make_session("a"), first := make_session("b"))
        assert placeable([large], places) == 0
        places.give_up(first)
        assert placeable([large], places) == 1

    def test_nobody_passes_the_head(self):
        places = make_places(3, num_pages=6)
        place(places, make_session("a", height=128))
        assert placeable([make_session("large", height=128), make_session("small")], places) == 0

    def test_pages_of_those_before_count(self):
        line = [make_session("large", height=128), make_session("b"), make_session("c")]
        assert placeable(line, make_places(3, num_pages=6)) == 2

    def test_who_was_put_off_is_not_placeable_until_a_place_is_given_up(self):
        places = make_places(3, num_pages=6)
        place(places, running := make_session("a"))
        put_off, behind = make_session("b"), make_session("c")
        places.take(put_off)
        places.put_off(put_off)
        assert placeable([put_off, behind], places) == 0
        assert placeable([behind], places) == 1, "it has left: nobody is held back"
        places.give_up(running)
        assert placeable([put_off, behind], places) == 2

    def test_another_group_may_have_room(self):
        places, session = make_places(3), make_session("a")
        places.take(session)
        places.put_off(session)
        places.offer(places.capacity)
        assert placeable([session], places) == 1

    def test_what_can_never_fit_is_refused_with_numbers(self):
        with pytest.raises(OutOfKVMemoryError, match=r"192x96 needs 6144 bytes.* has 4096"):
            make_places(1, num_pages=4).check_fits(VideoGeometry(96, 192))
        make_places(1, num_pages=6).check_fits(VideoGeometry(96, 192))


def test_earliest_playback_deadline_goes_first():
    places = make_places(2)
    ahead, behind = make_session("ahead", now_s=0.0), make_session("behind", now_s=0.1)
    place(places, ahead, behind)
    assert places.pick(1.0) is ahead
    ahead.chunk_made(1.0)
    ahead.undelivered = 0
    # 9 frames at 12 fps play until 1.75; the other has shown nothing yet.
    assert ahead.deadline_s == pytest.approx(1.75)
    assert places.pick(1.0) is behind
    behind.chunk_made(1.5)
    behind.undelivered = 0
    assert places.pick(1.5) is ahead


@pytest.mark.parametrize("apart_s", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("chunk_s", [1.0, 4.0])
def test_on_a_machine_that_is_too_slow_for_all_nobody_starves(apart_s, chunk_s):
    """Eight viewers come one after another; a chunk of each plays for a second."""
    places, order = make_places(8), []
    sessions = [make_session(str(number), now_s=number * apart_s) for number in range(8)]
    here: list[EngineSession] = []
    now_s = 0.0
    while len(order) < 400:
        coming = [one for one in sessions if one.began_s <= now_s and one not in here]
        place(places, *coming)
        here += coming
        chosen = places.pick(now_s)
        assert chosen is not None, "whoever reads may run ahead"
        now_s += chunk_s
        chosen.chunk_made(now_s)
        chosen.undelivered = 0
        order.append(chosen)
    # From the last arrival on: equal shares, and no longer a wait than for one chunk of each.
    together = order[-200:]
    assert {together.count(one) for one in sessions} == {25}
    for start in range(200 - 15):
        assert set(together[start : start + 15]) == set(sessions)


def test_a_client_that_does_not_read_is_not_scheduled():
    places, session = make_places(1), make_session("a")
    place(places, session)
    session.chunk_made(1.0)
    session.chunk_made(1.0)
    assert places.pick(5.0) is None
    assert places.wake_at_s() is None
    session.undelivered -= 1
    assert places.pick(5.0) is session


def test_a_session_whose_chunk_is_made_is_not_scheduled():
    places, session = make_places(1), make_session("a")
    place(places, session)
    session.move_to(SessionStatus.RUNNING)
    assert places.pick(5.0) is None


def test_max_lead_holds_a_session_back_until_playback_catches_up():
    places, session = make_places(1), make_session("a", lead_ms=250.0)
    place(places, session)
    assert places.pick(0.0) is session
    session.chunk_made(1.0)
    session.undelivered = 0
    # The next chunk is due at 1.75 and may be made from 1.5 on.
    assert places.pick(1.49) is None
    assert places.wake_at_s() == pytest.approx(1.5)
    assert places.pick(1.5) is session
