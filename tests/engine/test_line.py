"""The line in front of the workers: in order, and without needless attempts."""

import pytest

from tests.helpers.engine_bench import Bench, chunk_indices
from tests.helpers.fake_executor import FakeExecutor
from vllm_omni.diffusion.messages import SessionRequest
from vllm_omni.engine.session import Opened, Waiting
from vllm_omni.errors import OutOfKVMemoryError, WorkerFailedError

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


def test_who_came_too_large_while_it_loaded_does_not_block_the_line():
    """The pool has 4 pages; 64x96 takes 2, 192x96 takes 6."""
    bench = Bench(start=False)
    large, small = bench.open(height=192), bench.open()
    bench.engine.start()
    error = large.rest()[-1].error
    assert isinstance(error, OutOfKVMemoryError)
    assert "6144 bytes" in str(error)
    assert chunk_indices(small.rest()) == [0, 1, 2]
    assert bench.counted() == {"finished": 1}
    assert bench.metric("requests_refused_total", reason="out_of_memory") == 1
    bench.engine.close()


def test_a_restart_with_fewer_pages_ends_who_waits_for_more():
    """128x96 takes 4 pages, which the first group has."""
    bench = Bench(FakeExecutor(), FakeExecutor())
    bench.executors[1].num_pages = 2
    bench.executors[0].gate.clear()
    bench.executors[0].failures[0, 0] = WorkerFailedError("rank 0 died")
    running, large, small = bench.open(), bench.open(height=128), bench.open()
    bench.executors[0].gate.set()
    running.rest()
    assert isinstance(large.rest()[-1].error, OutOfKVMemoryError)
    assert chunk_indices(small.rest()) == [0, 1, 2]
    assert bench.executors[1].opened_total == 1
    bench.engine.close()
