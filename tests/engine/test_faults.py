"""What a worker group's faults cost: one session, or a restart, but not the server."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.helpers.engine_bench import Bench, chunk_indices, wait_until
from tests.helpers.fake_executor import FakeExecutor, make_request
from vllm_omni.diffusion.messages import ChunkPlan, ChunkResult, GroupCapacity, SessionRequest
from vllm_omni.engine import scheduler
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import ChunkReady, Opened, Waiting
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import (
    CheckpointError,
    InvalidRequestError,
    OmniError,
    SessionClosedError,
    WorkerFailedError,
    WorkerRestartedError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]


class Deadly(FakeExecutor):
    """Dies when it opens a session whose prompt says so."""

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        if request.prompt.text == "kill":
            raise WorkerFailedError("rank 0 died")
        super().open_session(session_id, request)


class Broken(FakeExecutor):
    """Does not start."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def start(self) -> GroupCapacity:
        raise self.error


class Loading(FakeExecutor):
    """Loads until a test lets it be ready, or until it is shut down."""

    def __init__(self) -> None:
        super().__init__()
        self.loading, self.go_on = threading.Event(), threading.Event()

    def start(self) -> GroupCapacity:
        self.loading.set()
        assert self.go_on.wait(20), "nobody let it go on"
        return super().start()

    def shutdown(self) -> None:
        super().shutdown()
        self.go_on.set()


class Hanging(FakeExecutor):
    """Makes no chunk, until it is shut down."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.ended = threading.Event(), threading.Event()

    def run_chunk(self, _plan: ChunkPlan, _deliver: Callable[[ChunkResult], None]) -> None:
        self.hangs.set()
        assert self.ended.wait(20), "nobody ended it"
        raise WorkerFailedError("rank 0 ended with exit code -9")

    def shutdown(self) -> None:
        super().shutdown()
        self.ended.set()


def test_an_open_that_kills_its_workers_costs_one_restart_and_one_session():
    bench = Bench(Deadly(), Deadly())
    bench.executors[0].gate.clear()
    running = bench.open()
    running.until(Opened)
    killer, queued = bench.open(prompt="kill"), bench.open()
    bench.executors[0].gate.set()
    running.rest()
    error = killer.rest()[-1].error
    assert isinstance(error, WorkerRestartedError)
    assert "rank 0 died" in str(error)
    assert chunk_indices(queued.rest()) == [0, 1, 2]
    assert chunk_indices(bench.open().rest()) == [0, 1, 2]
    assert bench.metric("worker_restarts_total") == 1
    assert bench.engine.unready_reason is None
    bench.engine.close()


def test_a_reset_that_kills_its_workers_costs_one_session():
    bench = Bench(Deadly(), Deadly())
    reader = bench.open(num_chunks=None)
    reader.until(ChunkReady)
    bench.engine.reset(reader.session_id, lambda _: make_request(prompt="kill"))
    assert isinstance(reader.rest()[-1].error, WorkerRestartedError)
    assert chunk_indices(bench.open().rest()) == [0, 1, 2]
    bench.engine.close()


def test_a_worker_that_dies_while_nobody_asks_is_replaced_before_anybody_does():
    bench = Bench(FakeExecutor(), FakeExecutor())
    bench.executors[0].dead = WorkerFailedError("rank 0 was killed")
    wait_until(lambda: bench.executors[1].started == 1)
    wait_until(lambda: bench.engine.unready_reason is None)
    assert chunk_indices(bench.open().rest()) == [0, 1, 2]
    assert bench.counted() == {"finished": 1.0}
    assert bench.metric("worker_restarts_total") == 1
    bench.engine.close()


def test_figures_are_right_after_a_restart():
    bench = Bench(FakeExecutor(), FakeExecutor())
    bench.executors[1].gate.clear()
    bench.executors[0].failures[0, 1] = WorkerFailedError("rank 0 died")
    lost = bench.open()
    assert lost.until(Opened)
    lost.rest()
    wait_until(lambda: bench.engine.unready_reason is None)
    assert bench.metric("kv_used_bytes") == 0
    assert bench.metric("num_requests_running") == 0
    next_one = bench.open()
    next_one.until(Opened)
    assert bench.metric("kv_used_bytes") == 2 * 1024
    bench.executors[1].gate.set()
    next_one.rest()
    assert bench.metric("kv_used_bytes") == 0
    bench.engine.close()


def test_giving_up_tells_those_in_line_the_truth():
    bench = Bench(FakeExecutor(), Broken(CheckpointError("the weights are gone")))
    bench.executors[0].gate.clear()
    bench.executors[0].failures[0, 0] = WorkerFailedError("rank 0 died")
    running, waiting = bench.open(), bench.open()
    bench.executors[0].gate.set()
    assert isinstance(running.rest()[-1].error, WorkerRestartedError)
    error = waiting.rest()[-1].error
    assert "the weights are gone" in str(error)
    assert error.code is None, "a client that tries again finds a server that has ended"
    assert bench.engine.unready_reason == str(error)
    bench.engine.close()


def test_what_the_engine_was_lost_by_holds_nothing_of_those_who_are_told():
    bench = Bench(Broken(InvalidRequestError("no such folder", field="model")), start=False)
    waiting = [bench.open(), bench.open()]
    with pytest.raises(InvalidRequestError):
        bench.engine.start()
    told = [reader.rest()[-1].error for reader in waiting]
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            bench.open()
        told.append(refused.value)
    failure = bench.engine.failure
    assert len({id(error) for error in (failure, *told)}) == 5
    assert {(type(e), str(e), e.field) for e in (failure, *told)} == {
        (InvalidRequestError, "model: no such folder", "model")
    }
    assert failure.__traceback__ is None
    bench.engine.close()


def test_a_bug_of_the_engine_is_no_restart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    bench = Bench()
    both_came = threading.Event()

    def buggy(_plan: ChunkPlan, _deliver: Callable[[ChunkResult], None]) -> None:
        assert both_came.wait(10)
        raise ZeroDivisionError

    bench.executors[0].run_chunk = buggy
    running, waiting = bench.open(), bench.open()
    both_came.set()
    for reader in (running, waiting):
        error = reader.rest()[-1].error
        assert "bug of its own" in str(error)
        assert error.code is None
    bench.engine.close()


class TestStart:
    @pytest.mark.parametrize(
        ("raised", "told"),
        [
            (CheckpointError("a tensor is missing"), "a tensor is missing"),
            (ZeroDivisionError("secret"), "bug of its own"),
        ],
    )
    def test_a_failed_start_ends_everybody_in_line(self, raised: BaseException, told: str):
        bench = Bench(Broken(raised), start=False)
        assert bench.engine.unready_reason == "loading"
        readers = [bench.open(), bench.open()]
        with pytest.raises(type(raised)):
            bench.engine.start()
        for reader in readers:
            error = reader.rest()[-1].error
            assert isinstance(error, OmniError)
            assert told in str(error)
        assert bench.engine.num_sessions == 0
        assert told in str(bench.engine.unready_reason)
        with pytest.raises(OmniError, match=told):
            bench.open()
        bench.engine.close()

    def test_draining_while_it_loads_ends_the_line_at_once(self):
        bench = Bench(Loading(), start=False)
        starting = threading.Thread(target=_start_in_vain, args=(bench.engine,))
        starting.start()
        assert bench.executors[0].loading.wait(10)
        reader = bench.open()
        bench.engine.drain()
        # Long before the start is over.
        assert isinstance(reader.rest()[-1].error, SessionClosedError)
        assert bench.engine.unready_reason == "draining"
        assert bench.counted() == {"unknown": 1}
        bench.engine.close()
        starting.join(10)
        assert not starting.is_alive()
        assert bench.engine.failure is None

    def test_a_client_that_leaves_while_it_loads_gives_up_its_place_at_once(self):
        bench = Bench(Loading(), start=False, max_queued=1)
        gone = bench.open()
        bench.engine.stop(gone.session_id)
        gone.rest()
        staying = bench.open()
        bench.executors[0].go_on.set()
        bench.engine.start()
        assert chunk_indices(staying.rest()) == [0, 1, 2]
        assert bench.executors[0].opened_total == 1
        bench.engine.close()

    def test_draining_while_it_restarts_ends_the_line_and_the_restart_at_once(self):
        bench = Bench(FakeExecutor(), Loading())
        bench.executors[0].gate.clear()
        bench.executors[0].failures[0, 0] = WorkerFailedError("rank 0 died")
        running, waiting = bench.open(), bench.open()
        bench.executors[0].gate.set()
        running.rest()
        assert bench.executors[1].loading.wait(10)
        assert bench.engine.unready_reason == "restarting"
        began_s = time.monotonic()
        bench.engine.drain()
        assert isinstance(waiting.rest()[-1].error, SessionClosedError)
        bench.engine.close()
        # Closing waits for a chunk that runs; here none does.
        assert time.monotonic() - began_s < 5
        assert bench.executors[1].shut_down == 1
        assert bench.engine.failure is None

    def test_a_chunk_cut_off_by_the_end_of_the_server_is_no_restart(self):
        """The chunk hangs; closing waits in vain and ends the workers under it."""
        bench = Bench(Hanging())
        reader = bench.open()
        assert bench.executors[0].hangs.wait(10)
        loop = bench.engine._replicas[0]._thread
        assert loop is not None
        bench.engine.close(0.1)
        error = reader.rest()[-1].error
        assert isinstance(error, SessionClosedError)
        assert bench.counted() == {"unknown": 1}
        loop.join(10)
        assert not loop.is_alive()

    def test_who_comes_while_it_restarts_is_told_its_position(self):
        bench = Bench(FakeExecutor(), Loading())
        bench.executors[0].failures[0, 0] = WorkerFailedError("rank 0 died")
        bench.open().rest()
        assert bench.executors[1].loading.wait(10)
        reader = bench.open()
        assert reader.next() == Waiting(1)
        bench.executors[1].go_on.set()
        assert chunk_indices(reader.rest()) == [0, 1, 2]
        bench.engine.close()

    @pytest.mark.parametrize("sessions", [0, 1])
    def test_a_drain_between_two_looks_of_the_loop_is_not_half_a_drain(
        self, monkeypatch: pytest.MonkeyPatch, sessions: int
    ):
        """The loop has seen that it goes on; before it asks for a task, the drain comes."""
        monkeypatch.setattr(scheduler, "IDLE_CHECK_S", 60.0)
        bench = Bench(start=False)
        readers = [bench.open(num_chunks=None) for _ in range(sessions)]
        drained = []

        def drain_once() -> None:
            if bench.executors[0].plans or not sessions:
                drained or drained.append(bench.engine.drain())

        bench.executors[0].check_alive = drain_once
        bench.engine.start()
        loop = bench.engine._replicas[0]._thread
        assert loop is not None
        for reader in readers:
            assert isinstance(reader.rest()[-1].error, SessionClosedError)
        loop.join(10)
        assert not loop.is_alive()
        bench.engine.close()


def _start_in_vain(engine: Engine) -> None:
    with pytest.raises(WorkerFailedError, match="shut down"):
        engine.start()


def test_a_group_that_cannot_start_again_is_not_tried_for_ever():
    slept: list[float] = []
    made = iter([FakeExecutor(), *(Broken(WorkerFailedError("no port")) for _ in range(5))])
    supervisor = WorkerSupervisor(lambda: next(made), warm_up=None, sleep=slept.append)
    engine = Engine(lambda _: supervisor, EngineMetrics("m"), max_queued=1)
    engine.start()
    supervisor.executor.failures[0, 0] = WorkerFailedError("rank 0 died")
    engine.open(make_request(), lambda _: None)
    wait_until(lambda: engine.failure is not None)
    assert len(slept) == 5
    assert "no port" in str(engine.failure)
    engine.close()
