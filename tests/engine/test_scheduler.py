"""What the monitor over all sessions decides, call by call, without threads and workers."""

import pytest

from tests.helpers.fake_executor import make_request
from vllm_omni.diffusion.messages import ChunkResult, GroupCapacity, TokenizedPrompt
from vllm_omni.engine import scheduler as scheduler_module
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import (
    ChunkTask,
    Ended,
    EndReason,
    EndTask,
    EngineSession,
    Opened,
    OpenTask,
    RestartTask,
    SessionEvent,
    StopCause,
    Waiting,
)
from vllm_omni.errors import (
    OmniError,
    OutOfKVMemoryError,
    ServerFullError,
    SessionClosedError,
    SessionFailedError,
    WorkerFailedError,
    WorkerRestartedError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler_module, "IDLE_CHECK_S", 0.0)


def group(sessions: int = 1, num_pages: int = 100) -> GroupCapacity:
    """With pages of which a 64x96 session takes two."""
    return GroupCapacity(sessions, num_pages, page_tokens=128, page_bytes=1024, window_frames=9)


class Client:
    """Somebody in line, and what it was told."""

    def __init__(self, scheduler: Scheduler, **changes: object) -> None:
        self.events: list[SessionEvent] = []
        request = make_request(**{"num_chunks": None, **changes})
        self.session_id = scheduler.open(request, self.events.append)

    def positions(self) -> list[int]:
        return [event.position for event in self.events if isinstance(event, Waiting)]

    @property
    def end(self) -> Ended:
        """The one and only end, which is the last event."""
        ends = [event for event in self.events if isinstance(event, Ended)]
        assert ends == self.events[-1:]
        return ends[0]


def make_scheduler(*, sessions: int = 1, max_queued: int = 4, num_pages: int = 100) -> Scheduler:
    scheduler = Scheduler(EngineMetrics("m"), max_queued=max_queued)
    scheduler.adopt(group(sessions, num_pages))
    return scheduler


def begin_opening(scheduler: Scheduler) -> EngineSession:
    """The workers begin to open the session at the head of the line."""
    task = scheduler.next_task()
    assert isinstance(task, OpenTask)
    return task.session


def place(scheduler: Scheduler, **changes: object) -> Client:
    """Somebody with a place."""
    client = Client(scheduler, **changes)
    session = begin_opening(scheduler)
    assert session.session_id == client.session_id
    scheduler.task_done(session)
    return client


def make_chunk(scheduler: Scheduler) -> ChunkTask:
    """The workers make the next chunk, and its client takes it."""
    task = scheduler.next_task()
    assert isinstance(task, ChunkTask)
    plan = task.plan
    data = make_request().image.rgb
    assert data is not None
    scheduler.chunk_made(task, ChunkResult(plan.session_id, plan.chunk_index, data, 0.0))
    scheduler.delivered(plan.session_id)
    scheduler.task_done(task.session)
    return task


def finish(scheduler: Scheduler, client: Client) -> EndTask:
    """The workers are told to close a session."""
    task = scheduler.next_task()
    assert isinstance(task, EndTask)
    assert task.session.session_id == client.session_id
    scheduler.tell_end(task.session, task.reason, task.error, peak_bytes=0)
    return task


class TestLine:
    def test_places_are_given_in_order_of_arrival(self):
        scheduler = make_scheduler()
        first, second = Client(scheduler), Client(scheduler)
        assert begin_opening(scheduler).session_id == first.session_id
        assert scheduler.is_waiting(first.session_id)
        assert scheduler.is_waiting(second.session_id)

    def test_positions_follow_the_line(self):
        scheduler = make_scheduler()
        place(scheduler)
        second, third = Client(scheduler), Client(scheduler)
        assert (second.positions()[-1], third.positions()[-1]) == (1, 2)
        scheduler.stop(second.session_id)
        assert third.positions()[-1] == 1
        assert second.end == Ended(EndReason.STOPPED)

    def test_a_full_line_refuses_with_numbers_and_leaves_no_trace(self):
        scheduler = make_scheduler(max_queued=1)
        place(scheduler)
        Client(scheduler)
        with pytest.raises(ServerFullError, match=r"1 of 1 sessions run and 1 of 1 wait"):
            Client(scheduler)
        assert scheduler.num_sessions == 2

    def test_only_those_who_have_to_wait_count_as_waiting(self):
        scheduler = make_scheduler(sessions=2, max_queued=1)
        clients = [Client(scheduler) for _ in range(3)]
        assert [client.positions() for client in clients[:2]] == [[], []]
        with pytest.raises(ServerFullError, match="1 of 1 wait"):
            Client(scheduler)

    def test_no_line_still_admits_up_to_the_places(self):
        scheduler = make_scheduler(sessions=2, max_queued=0)
        clients = [Client(scheduler), Client(scheduler)]
        with pytest.raises(ServerFullError):
            Client(scheduler)
        assert all(client.events == [] for client in clients)

    def test_without_a_group_everybody_waits(self):
        scheduler = Scheduler(EngineMetrics("m"), max_queued=1)
        client = Client(scheduler)
        assert client.events == [Waiting(1)]
        assert scheduler.next_task() is None
        with pytest.raises(ServerFullError):
            Client(scheduler)

    def test_who_can_never_fit_into_a_new_group_is_told(self):
        scheduler = Scheduler(EngineMetrics("m"), max_queued=2)
        large, small = Client(scheduler, height=192), Client(scheduler)
        scheduler.adopt(group(num_pages=4))
        assert isinstance(large.end.error, OutOfKVMemoryError)
        assert begin_opening(scheduler).session_id == small.session_id


class TestNoRoomAfterAll:
    """The workers have less room than they said."""

    def put_off(self, scheduler: Scheduler) -> tuple[Client, EngineSession]:
        client = Client(scheduler)
        session = begin_opening(scheduler)
        return client, session

    def test_with_others_it_waits_at_the_head_until_a_place_is_given_up(self):
        scheduler = make_scheduler(sessions=3)
        running = place(scheduler)
        client, session = self.put_off(scheduler)
        behind = Client(scheduler)
        scheduler.task_done(session, OutOfKVMemoryError("no pages"))
        assert (client.positions()[-1], behind.positions()[-1]) == (1, 2)
        make_chunk(scheduler)  # Nobody is opened instead.
        scheduler.stop(running.session_id)
        finish(scheduler, running)
        assert begin_opening(scheduler) is session

    def test_alone_it_fails(self):
        scheduler = make_scheduler(sessions=3)
        client, session = self.put_off(scheduler)
        error = OutOfKVMemoryError("no pages")
        scheduler.task_done(session, error)
        assert finish(scheduler, client).error is error

    @pytest.mark.parametrize("how", ["stop", "drain"])
    def test_who_is_to_end_does_not_wait_again(self, how: str):
        scheduler = make_scheduler(sessions=3)
        place(scheduler)
        client, session = self.put_off(scheduler)
        if how == "stop":
            scheduler.stop(client.session_id)
        else:
            scheduler.drain()
        scheduler.task_done(session, OutOfKVMemoryError("no pages"))
        assert client.end.reason is (EndReason.STOPPED if how == "stop" else EndReason.FAILED)
        assert scheduler.num_sessions == 1

    def test_a_restart_without_room_fails(self):
        scheduler = make_scheduler(sessions=3)
        place(scheduler)
        client = place(scheduler)
        scheduler.reset(client.session_id, lambda request: request)
        tasks = [scheduler.next_task(), scheduler.next_task()]
        (task,) = (task for task in tasks if isinstance(task, RestartTask))
        scheduler.task_done(task.session, OutOfKVMemoryError("no pages"))
        assert isinstance(finish(scheduler, client).error, OutOfKVMemoryError)


class TestEnds:
    def test_a_stop_while_the_workers_open_ends_the_session_on_the_workers(self):
        scheduler = make_scheduler()
        client = Client(scheduler)
        session = begin_opening(scheduler)
        scheduler.stop(client.session_id)
        assert client.events == [], "nobody is told before the workers have let it go"
        scheduler.task_done(session)
        assert finish(scheduler, client).reason is EndReason.STOPPED
        assert [type(event) for event in client.events] == [Opened, Ended]

    def test_a_drain_while_the_workers_open_ends_everybody(self):
        scheduler = make_scheduler()
        opening, waiting = Client(scheduler), Client(scheduler)
        session = begin_opening(scheduler)
        scheduler.drain()
        assert isinstance(waiting.end.error, SessionClosedError)
        assert not scheduler.is_over()
        scheduler.task_done(session)
        assert isinstance(finish(scheduler, opening).error, SessionClosedError)
        assert scheduler.is_over()
        assert scheduler.next_task() is None
        with pytest.raises(SessionClosedError):
            Client(scheduler)

    def test_a_rollout_ends_with_its_last_chunk_whatever_else_is_wanted(self):
        scheduler = make_scheduler()
        client = place(scheduler, num_chunks=1)
        make_chunk(scheduler)
        scheduler.stop(client.session_id)
        assert finish(scheduler, client).reason is EndReason.FINISHED

    def test_a_failed_task_ends_its_session(self):
        scheduler = make_scheduler()
        client = place(scheduler)
        task = scheduler.next_task()
        assert isinstance(task, ChunkTask)
        scheduler.task_done(task.session, SessionFailedError("a chunk raised"))
        assert isinstance(finish(scheduler, client).error, SessionFailedError)
        assert scheduler.num_sessions == 0

    def test_a_lost_group_ends_those_with_places_and_nobody_else(self):
        scheduler = make_scheduler(sessions=2)
        running, opening, waiting = place(scheduler), Client(scheduler), Client(scheduler)
        begin_opening(scheduler)
        scheduler.lose_group(WorkerFailedError("rank 0 died"))
        for client in (running, opening):
            assert isinstance(client.end.error, WorkerRestartedError)
        assert waiting.positions()[-1] == 1
        assert scheduler.unready_reason == "restarting"
        scheduler.adopt(group())
        assert begin_opening(scheduler).session_id == waiting.session_id

    def test_a_group_that_is_lost_while_draining_restarted_nobody(self):
        scheduler = make_scheduler()
        client = place(scheduler)
        scheduler.drain()
        scheduler.lose_group(WorkerFailedError("rank 0 died"))
        assert isinstance(client.end.error, SessionClosedError)
        assert scheduler.is_over()

    def test_an_ended_session_takes_no_calls(self):
        scheduler = make_scheduler()
        client = place(scheduler)
        scheduler.stop(client.session_id, StopCause.ASKED)
        assert isinstance(scheduler.next_task(), EndTask)
        with pytest.raises(SessionClosedError):
            scheduler.submit(client.session_id, ControlEvent("e", prompt=TokenizedPrompt("night")))
        with pytest.raises(SessionClosedError):
            scheduler.reset(client.session_id, lambda request: request)
        scheduler.stop(client.session_id)
        scheduler.delivered(client.session_id)
        assert not scheduler.is_waiting(client.session_id)


def test_states_of_readiness():
    scheduler = Scheduler(EngineMetrics("m"), max_queued=1)
    assert scheduler.unready_reason == "loading"
    scheduler.adopt(group())
    assert scheduler.unready_reason is None
    scheduler.lose_group(WorkerFailedError("rank 0 died"))
    assert scheduler.unready_reason == "restarting"
    scheduler.drain()
    assert scheduler.unready_reason == "draining"
    failure: OmniError = WorkerFailedError("no port")
    scheduler.lose_replica(failure, 0)
    assert scheduler.unready_reason == "no port"
    assert scheduler.is_over()


def test_who_could_have_a_place_only_on_a_removed_replica_does_not_block_the_line():
    """A 64x96 session takes two pages, a 128x96 one four."""
    scheduler = make_scheduler(num_pages=2)
    place(scheduler)
    scheduler.add_replica(1)
    scheduler.adopt(group(num_pages=4), 1)
    large, small = Client(scheduler, height=128), Client(scheduler)
    assert (large.positions(), small.positions()) == ([], [1])
    scheduler.remove_replica(1)
    assert isinstance(large.end.error, OutOfKVMemoryError)
    assert small.positions()[-1] == 1


def test_events_fold_into_the_chunk_and_resets_go_first():
    scheduler = make_scheduler()
    client = place(scheduler)
    scheduler.submit(client.session_id, ControlEvent("p", prompt=TokenizedPrompt("night")))
    scheduler.reset(client.session_id, lambda request: request)
    task = scheduler.next_task()
    assert isinstance(task, RestartTask)
    assert task.request.prompt.text == "night"
    scheduler.restarted(task)
    scheduler.task_done(task.session)
    assert make_chunk(scheduler).receipt.started == ("p",)


def test_only_the_scheduler_can_take_its_lock():
    class Sub(Scheduler):
        def lock(self) -> object:
            return self.__lock

    with pytest.raises(AttributeError):
        Sub(EngineMetrics("m"), max_queued=1).lock()
