"""The engine's loop on a fake executor: every way a session can go and end."""

import queue
import threading
import time
from dataclasses import replace

import pytest

from tests.helpers.engine_bench import Bench, chunk_indices, wait_until
from tests.helpers.fake_executor import FakeExecutor, make_request
from vllm_omni.diffusion.camera_motion import CameraVelocity
from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.engine import scheduler
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import (
    ChunkReady,
    Ended,
    EndReason,
    Opened,
    SessionEvent,
    WasReset,
)
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import (
    DeviceOutOfMemoryError,
    OutOfKVMemoryError,
    ServerFullError,
    SessionClosedError,
    WorkerFailedError,
    WorkerRestartedError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

FORWARD = CameraVelocity((0.0, 0.0, 0.05), (0.0, 0.0, 0.0, 1.0))


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.engine.close()


def test_a_rollout_opens_makes_its_chunks_and_ends(bench: Bench):
    events = bench.open().rest()
    assert [type(event) for event in events] == [Opened, *[ChunkReady] * 3, Ended]
    assert chunk_indices(events) == [0, 1, 2]
    assert [event.last for event in events[1:4]] == [False, False, True]
    assert events[-1] == Ended(EndReason.FINISHED, peak_bytes=4096)
    assert bench.executors[0].open_ids == []
    assert bench.executors[0].closed_total == 1


def test_stop_acts_at_the_chunk_boundary(bench: Bench):
    reader = bench.open(num_chunks=None)
    reader.until(ChunkReady)
    bench.engine.stop(reader.session_id)
    assert reader.rest()[-1].reason is EndReason.STOPPED
    assert bench.executors[0].open_ids == []


def test_stop_of_a_waiting_session_frees_its_place_in_the_line(bench: Bench):
    bench.executors[0].gate.clear()
    running = bench.open()
    running.until(Opened)
    second, third = bench.open(), bench.open()
    bench.engine.stop(second.session_id)
    bench.executors[0].gate.set()
    assert second.rest()[-1] == Ended(EndReason.STOPPED)
    running.rest()
    assert chunk_indices(third.rest()) == [0, 1, 2]
    assert bench.executors[0].opened_total == 2


def test_two_sessions_take_turns():
    bench = Bench(FakeExecutor(sessions=2))
    bench.executors[0].gate.clear()
    first, second = bench.open(), bench.open()
    bench.executors[0].gate.set()
    assert chunk_indices(first.rest()) == chunk_indices(second.rest()) == [0, 1, 2]
    order = [plan.session_id for plan in bench.executors[0].plans]
    assert set(order[:2]) == set(order[2:4]) == {first.session_id, second.session_id}
    bench.engine.close()


def test_a_full_server_refuses_and_queued_sessions_are_served():
    bench = Bench(max_queued=1)
    bench.executors[0].gate.clear()
    first = bench.open()
    first.until(Opened)
    second = bench.open()
    with pytest.raises(ServerFullError):
        bench.open()
    bench.executors[0].gate.set()
    first.rest()
    assert chunk_indices(second.rest()) == [0, 1, 2]
    bench.engine.close()


def test_a_size_that_never_fits_is_refused_with_bytes(bench: Bench):
    with pytest.raises(OutOfKVMemoryError, match=r"needs \d+ bytes.*has 4096"):
        bench.open(height=480, width=832)


def test_a_chunk_that_raises_ends_its_session_only():
    bench = Bench(FakeExecutor(sessions=2))
    error = DeviceOutOfMemoryError("chunk 1 ran out of device memory")
    bench.executors[0].failures[0, 1] = error
    bench.executors[0].gate.clear()
    failing, other = bench.open(), bench.open()
    bench.executors[0].gate.set()
    assert failing.rest()[-1] == Ended(EndReason.FAILED, error)
    assert chunk_indices(other.rest()) == [0, 1, 2]
    assert bench.executors[0].open_ids == []
    bench.engine.close()


def test_a_lost_group_is_relaunched_and_queued_sessions_are_served():
    bench = Bench(FakeExecutor(), FakeExecutor())
    bench.executors[0].failures[0, 1] = WorkerFailedError("rank 0 died")
    bench.executors[0].gate.clear()
    running = bench.open()
    running.until(Opened)
    queued = bench.open()
    bench.executors[0].gate.set()
    ended = running.rest()[-1]
    assert ended.reason is EndReason.FAILED
    assert isinstance(ended.error, WorkerRestartedError)
    assert ended.error.code == "worker_restarted"
    assert chunk_indices(queued.rest()) == [0, 1, 2]
    assert bench.executors[0].shut_down == 1
    assert bench.engine.unready_reason is None
    bench.engine.close()


def test_the_engine_gives_up_after_five_restarts():
    executors = [FakeExecutor() for _ in range(6)]
    for executor in executors:
        executor.failures[0, 0] = WorkerFailedError("rank 0 died")
    bench = Bench(*executors)
    for _ in range(6):
        assert isinstance(bench.open().rest()[-1].error, WorkerRestartedError)
    wait_until(lambda: bench.engine.failure is not None)
    assert "giving up" in str(bench.engine.failure)
    with pytest.raises(WorkerFailedError):
        bench.open()
    assert bench.engine.unready_reason is not None
    bench.engine.close()


def test_reset_restarts_with_the_current_prompt(bench: Bench):
    executor = bench.executors[0]
    reader = bench.open(num_chunks=None)
    reader.until(ChunkReady)
    bench.engine.submit(reader.session_id, ControlEvent("p", prompt=TokenizedPrompt("night")))
    executor.gate.clear()
    bench.engine.reset(reader.session_id, lambda request: replace(request, seed=7))
    executor.gate.set()
    reader.until(WasReset)
    assert reader.until(ChunkReady).result.chunk_index == 0
    request = executor.requests[reader.session_id]
    assert (request.prompt.text, request.seed) == ("night", 7)
    bench.engine.stop(reader.session_id)
    reader.rest()
    assert executor.open_ids == []


def test_events_for_unknown_sessions_create_nothing(bench: Bench):
    with pytest.raises(SessionClosedError):
        bench.engine.submit("nobody", ControlEvent("e", camera=FORWARD))
    with pytest.raises(SessionClosedError):
        bench.engine.reset("nobody", lambda request: request)
    bench.engine.stop("nobody")
    assert bench.engine.num_sessions == 0


def test_a_control_shows_in_the_next_chunk_that_starts_after_it(bench: Bench):
    executor = bench.executors[0]
    reader = bench.open(num_chunks=None)
    for index in range(20):
        reader.until(ChunkReady)
        executor.gate.clear()
        planned = len(executor.plans)
        bench.engine.submit(reader.session_id, ControlEvent(f"e{index}", camera=FORWARD))
        executor.gate.set()
        seen = []
        while f"e{index}" not in seen:
            seen += reader.until(ChunkReady).receipt.started
        # One chunk may have been planned before the event; the one after it must show it.
        assert len(executor.plans) <= planned + 3
    bench.engine.stop(reader.session_id)


def test_a_client_that_does_not_read_pauses_its_session():
    bench = Bench(FakeExecutor(sessions=2))
    idle = bench.open(num_chunks=None)
    assert chunk_indices(bench.open().rest()) == [0, 1, 2]
    assert len([p for p in bench.executors[0].plans if p.session_id == idle.session_id]) <= 2
    bench.engine.close()


def test_drain_ends_everybody_with_an_error_and_refuses_new_ones():
    bench = Bench(FakeExecutor(chunk_s=0.01))
    reader = bench.open(num_chunks=None)
    reader.until(ChunkReady)
    waiting = bench.open()
    bench.engine.close()
    assert isinstance(reader.rest()[-1].error, SessionClosedError)
    assert isinstance(waiting.rest()[-1].error, SessionClosedError)
    with pytest.raises(SessionClosedError):
        bench.open()
    assert bench.executors[0].shut_down == 1
    assert not any(thread.name == "engine" for thread in threading.enumerate())


def test_metrics_count_what_happened(bench: Bench):
    bench.open().rest()
    registry = bench.engine.metrics.registry
    labels = {"model_name": "m"}
    assert registry.get_sample_value("vllm_omni:chunks_total", labels) == 3
    assert registry.get_sample_value("vllm_omni:num_requests_running", labels) == 0
    finished = {**labels, "finished_reason": "finished"}
    assert registry.get_sample_value("vllm_omni:requests_success_total", finished) == 1


def test_a_session_that_comes_while_the_loop_falls_asleep_wakes_it(monkeypatch):
    """The loop finds nobody in line; a session comes before it sleeps."""
    monkeypatch.setattr(scheduler, "IDLE_CHECK_S", 60.0)
    bench = Bench(start=False)
    pick, coming, opened = bench.engine._roster.fleet[0].pick, [], []

    def pick_while_somebody_comes(now_s: float):
        if not coming:
            coming.append(threading.Thread(target=lambda: opened.append(bench.open())))
            coming[0].start()
            coming[0].join(0.1)
            assert coming[0].is_alive(), "it waits for the decision"
        return pick(now_s)

    bench.engine._roster.fleet[0].pick = pick_while_somebody_comes
    bench.engine.start()
    wait_until(lambda: bool(opened))
    assert chunk_indices(opened[0].rest()) == [0, 1, 2]
    bench.engine.close()


class TestASleepingLoopIsWoken:
    """The only session is paused, since its client takes nothing, and the loop sleeps for ever."""

    @pytest.fixture
    def paused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(scheduler, "IDLE_CHECK_S", 60.0)
        bench = Bench(FakeExecutor(sessions=2))
        reader = bench.open(num_chunks=None)
        wait_until(lambda: len(bench.executors[0].plans) == 2)
        time.sleep(0.1)  # Enough to fall asleep; if not, the test asks less.
        yield bench, reader
        bench.engine.close()

    def test_by_a_stop(self, paused):
        bench, reader = paused
        bench.engine.stop(reader.session_id)
        assert reader.rest()[-1].reason is EndReason.STOPPED

    def test_by_a_drain(self, paused):
        bench, reader = paused
        bench.engine.drain()
        assert isinstance(reader.rest()[-1].error, SessionClosedError)

    def test_by_a_client_that_takes_a_chunk(self, paused):
        _, reader = paused
        assert chunk_indices([reader.until(ChunkReady) for _ in range(4)]) == [0, 1, 2, 3]

    def test_by_another_client(self, paused):
        bench, _ = paused
        assert chunk_indices(bench.open().rest()) == [0, 1, 2]


def test_closing_while_a_group_is_relaunched_starts_no_other():
    relaunching, closed = threading.Event(), threading.Event()
    made: list[FakeExecutor] = []

    def make() -> FakeExecutor:
        made.append(FakeExecutor())
        if len(made) == 1:
            made[0].failures[(0, 0)] = WorkerFailedError("killed")
        return made[-1]

    def sleep(_: float) -> None:
        relaunching.set()
        assert closed.wait(10)

    supervisor = WorkerSupervisor(make, warm_up=None, sleep=sleep)
    engine = Engine(lambda _: supervisor, EngineMetrics("m"), max_queued=4)
    engine.start()
    loop = engine._replicas[0]._thread
    assert loop is not None
    events: queue.SimpleQueue[SessionEvent] = queue.SimpleQueue()
    engine.open(make_request(), events.put)
    assert relaunching.wait(10)
    engine.close(timeout_s=0.0)
    closed.set()
    loop.join(10)
    assert not loop.is_alive()
    assert len(made) == 1
    with pytest.raises(WorkerFailedError):
        _ = supervisor.executor
