"""The line in front of the workers: in order, and without needless attempts."""

import pytest

from tests.helpers.engine_bench import Bench
from tests.helpers.fake_executor import FakeExecutor
from vllm_omni.diffusion.messages import SessionRequest
from vllm_omni.engine.session import Opened, Waiting
from vllm_omni.errors import OutOfKVMemoryError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


class Counting(FakeExecutor):
    """Counts the attempts to open, and has less room than it says if told so."""

    def __init__(self, *, sessions: int, rooms: int | None = None) -> None:
        super().__init__(sessions=sessions)
        self.attempts = 0
        self.rooms = sessions if rooms is None else rooms

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        self.attempts += 1
        if len(self.open_ids) >= self.rooms:
            raise OutOfKVMemoryError("no pages")
        super().open_session(session_id, request)


def test_a_head_without_room_is_not_opened_until_there_is():
    """The pool has 4 pages; 64x96 takes 2, 128x96 takes 4."""
    bench = Bench(Counting(sessions=2))
    running = bench.open(num_chunks=10)
    running.until(Opened)
    large = bench.open(height=128)
    small = bench.open()
    assert large.next() == Waiting(1)
    running.rest()
    assert bench.executors[0].attempts <= 2
    large.rest()
    small.rest()
    assert bench.executors[0].attempts == 3
    order = list(bench.executors[0].requests.values())
    assert [request.height for request in order] == [64, 128, 64]
    bench.engine.close()


def test_a_head_that_the_workers_refuse_is_tried_once_per_end():
    bench = Bench(Counting(sessions=2, rooms=1))
    running = bench.open(num_chunks=10)
    running.until(Opened)
    second = bench.open()
    assert second.until(Waiting) == Waiting(1)
    running.rest()
    second.rest()
    assert bench.executors[0].attempts == 3
    bench.engine.close()
