"""Several replicas behind one line, on fake workers."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.engine_bench import Reader, chunk_indices, wait_until
from tests.helpers.fake_executor import FakeExecutor, make_request
from vllm_omni.diffusion.data import ReplicaConfig
from vllm_omni.engine import places
from vllm_omni.engine.engine import Engine, idle_replica, needs_one_more
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.roster import Demand
from vllm_omni.engine.session import ChunkReady, Ended, EndReason, Opened, SessionEvent, Waiting
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import (
    CheckpointError,
    InvalidRequestError,
    OutOfKVMemoryError,
    ServerFullError,
    WorkerFailedError,
    WorkerRestartedError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


class Replicas:
    """An engine of several replicas; each makes its generations of workers from its own list."""

    def __init__(
        self, *of_replica: list[FakeExecutor], least: int | None = None, max_queued: int = 4, **more
    ) -> None:
        self.executors = of_replica
        config = ReplicaConfig(len(of_replica) if least is None else least, len(of_replica), **more)
        metrics = EngineMetrics("m", by_replica=True)
        self.engine = Engine(self._supervisor, metrics, max_queued=max_queued, config=config)

    def _supervisor(self, replica: int) -> WorkerSupervisor:
        generations = iter(self.executors[replica])
        return WorkerSupervisor(lambda: next(generations), warm_up=None, sleep=lambda _: None)

    def __enter__(self) -> "Replicas":
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        for generations in self.executors:
            for executor in generations:
                executor.gate.set()
        self.engine.close()

    def open(self, **changes: object) -> Reader:
        events: queue.SimpleQueue[SessionEvent] = queue.SimpleQueue()
        request = make_request(**{"num_chunks": None, **changes})
        return Reader(self.engine, self.engine.open(request, events.put), events)

    def opened(self, **changes: object) -> Reader:
        """A session that has a place."""
        reader = self.open(**changes)
        reader.until(Opened)
        return reader

    def all_ready(self) -> bool:
        return [one.state for one in self.engine.replicas()] == ["ready"] * len(self.executors)

    def sessions(self) -> list[int]:
        return [one.sessions for one in self.engine.replicas()]


@pytest.fixture
def two():
    """Two replicas of two places."""
    with Replicas([FakeExecutor(sessions=2)], [FakeExecutor(sessions=2)]) as made:
        wait_until(made.all_ready)
        yield made


class TestPlaces:
    def test_the_replica_with_the_most_free_places_takes_who_comes(self, two):
        for _ in range(4):
            two.opened()
        assert two.sessions() == [2, 2]
        assert two.engine.max_sessions == 4

    def test_positions_count_over_all_replicas_and_the_head_goes_where_a_place_is(self, two):
        readers = [two.opened() for _ in range(4)]
        first, second = two.open(), two.open()
        assert first.until(Waiting) == Waiting(1)
        assert second.until(Waiting) == Waiting(2)
        of_replica_1 = next(one for one in readers if _replica(two, one) == 1)
        two.engine.stop(of_replica_1.session_id)
        first.until(Opened)
        assert _replica(two, first) == 1
        assert second.until(Waiting) == Waiting(1)

    def test_a_full_line_is_one_of_all_replicas(self):
        with Replicas([FakeExecutor()], [FakeExecutor()], max_queued=1) as made:
            wait_until(made.all_ready)
            made.opened()
            made.opened()
            made.open()
            with pytest.raises(ServerFullError, match="2 of 2 sessions run and 1 of 1 wait"):
                made.open()

    def test_pages_decide_too_and_a_small_session_does_not_pass_a_large_one(self):
        # Of 4 pages a 64x96 session takes 2, a 128x96 one all 4.
        with Replicas([FakeExecutor(sessions=4)], [FakeExecutor(sessions=4)]) as made:
            wait_until(made.all_ready)
            one, _ = made.opened(), made.opened()
            assert made.sessions() == [1, 1]
            large = made.open(height=128)
            assert large.until(Waiting) == Waiting(1)
            small = made.open()
            assert small.until(Waiting) == Waiting(2)
            made.engine.stop(one.session_id)
            large.until(Opened)
            small.until(Opened)
            assert sorted(made.sessions()) == [1, 2]
            with pytest.raises(OutOfKVMemoryError):
                made.open(height=512)

    def test_a_replica_that_hangs_holds_nobody_up(self, monkeypatch):
        monkeypatch.setattr(places, "AT_HAND_S", 0.1)
        hanging, other = FakeExecutor(sessions=3), FakeExecutor(sessions=2)
        with Replicas([hanging], [other]) as made:
            wait_until(made.all_ready)
            hanging.gate.clear()
            first = made.opened()
            assert _replica(made, first) == 0
            assert hanging.at_gate.wait(10)
            # Two places are free on each; the hanging one has the lower number.
            time.sleep(0.2)
            assert _replica(made, made.opened()) == 1
            assert isinstance(made.opened().next(), ChunkReady)


class TestLosses:
    def test_a_lost_group_costs_its_own_sessions_only(self):
        lost, other = FakeExecutor(), FakeExecutor()
        with Replicas([lost, FakeExecutor()], [other]) as made:
            wait_until(made.all_ready)
            lost.gate.clear()
            lost.failures[0, 0] = WorkerFailedError("rank 0 died")
            victim = made.opened()
            assert _replica(made, victim) == 0
            survivor = made.opened(num_chunks=5)
            lost.gate.set()
            assert isinstance(victim.rest()[-1].error, WorkerRestartedError)
            assert chunk_indices(survivor.rest()) == [0, 1, 2, 3, 4]
            wait_until(made.all_ready)
            sample = made.engine.metrics.registry.get_sample_value
            restarts = [
                sample(
                    "vllm_omni:worker_restarts_total", {"model_name": "m", "replica": str(number)}
                )
                for number in (0, 1)
            ]
            assert restarts == [1, 0]

    def test_the_engine_serves_while_one_replica_does_and_fails_with_the_last(self):
        lost, last = FakeExecutor(), FakeExecutor()
        with Replicas([lost, Broken()], [last, Broken()]) as made:
            wait_until(made.all_ready)
            lost.dead = WorkerFailedError("rank 0 died")
            wait_until(lambda: made.engine.replicas()[0].state == "failed")
            assert made.engine.unready_reason is None
            assert made.engine.max_sessions == 1
            assert "a tensor is missing" in (made.engine.replicas()[0].failure or "")
            assert chunk_indices(made.opened(num_chunks=2).rest()) == [0, 1]
            waiting = made.open()
            last.dead = WorkerFailedError("rank 0 died")
            assert isinstance(waiting.until(Ended).error, WorkerRestartedError | CheckpointError)
            wait_until(lambda: made.engine.failure is not None)

    def test_the_engine_fails_when_the_last_ends_after_the_others_were_lost(self):
        lost, drained = FakeExecutor(), FakeExecutor()
        with Replicas([lost, Broken()], [drained]) as made:
            wait_until(made.all_ready)
            readers = [made.opened(), made.opened()]
            staying = next(one for one in readers if _replica(made, one) == 1)
            made.engine.drain_replica(1)
            waiting = made.open()
            lost.dead = WorkerFailedError("rank 0 died")
            # Nobody can ever serve who waits; who plays goes on to the end.
            assert isinstance(waiting.rest()[-1].error, CheckpointError)
            assert isinstance(staying.next(), Opened | ChunkReady)
            assert made.engine.failure is None
            made.engine.stop(staying.session_id)
            assert staying.rest()[-1].reason is EndReason.STOPPED
            wait_until(lambda: made.engine.failure is not None)
            assert "a tensor is missing" in (made.engine.unready_reason or "")

    def test_the_start_fails_if_none_is_left_that_could_serve(self):
        slow, lost = Broken(), FakeExecutor()
        slow.gate.clear()
        made = Replicas([slow], [FakeExecutor()], [lost, Broken()])
        with ThreadPoolExecutor() as pool:
            start = pool.submit(made.engine.start)
            try:
                wait_until(
                    lambda: [one.state for one in made.engine.replicas()[1:]] == ["ready"] * 2
                )
                made.engine.drain_replica(1)
                lost.dead = WorkerFailedError("rank 0 died")
                wait_until(lambda: made.engine.replicas()[2].state == "failed")
                slow.gate.set()
                with pytest.raises(CheckpointError, match="a tensor is missing"):
                    start.result(5)
            finally:
                slow.gate.set()
                made.engine.close()

    def test_a_session_that_fits_only_a_lost_replica_does_not_block_the_line(self):
        large, small = FakeExecutor(), FakeExecutor()
        small.num_pages = 2
        with Replicas([large, Broken()], [small]) as made:
            wait_until(made.all_ready)
            made.opened(height=128)
            blocking, behind = made.open(height=128), made.open()
            large.dead = WorkerFailedError("rank 0 died")
            assert isinstance(blocking.rest()[-1].error, OutOfKVMemoryError)
            behind.until(Opened)

    def test_a_replica_that_does_not_start_is_no_reason_not_to_serve(self):
        with Replicas([Broken()], [FakeExecutor()]) as made:
            assert made.engine.unready_reason is None
            assert chunk_indices(made.open(num_chunks=2).rest()) == [0, 1]

    def test_without_any_that_starts_the_start_fails(self):
        made = Replicas([Broken()], [Broken()])
        with pytest.raises(CheckpointError, match="a tensor is missing"):
            made.engine.start()
        made.engine.close()


class TestDrain:
    def test_a_drained_replica_keeps_its_session_and_gets_no_other(self, two):
        staying = two.opened(num_chunks=6)
        number = _replica(two, staying)
        two.engine.drain_replica(number)
        others = [two.opened() for _ in range(2)]
        assert {_replica(two, one) for one in others} == {1 - number}
        assert two.open().until(Waiting) == Waiting(1)
        assert chunk_indices(staying.rest()) == list(range(6))
        wait_until(lambda: [one.number for one in two.engine.replicas()] == [1 - number])
        assert two.executors[number][0].shut_down == 1

    def test_the_last_one_cannot_be_drained(self, two):
        two.engine.drain_replica(0)
        with pytest.raises(InvalidRequestError, match="the only one that serves"):
            two.engine.drain_replica(1)
        with pytest.raises(InvalidRequestError, match="no replica 7"):
            two.engine.drain_replica(7)

    def test_a_session_that_fits_only_a_drained_replica_does_not_block_the_line(self):
        large, small = FakeExecutor(), FakeExecutor()
        small.num_pages = 2
        with Replicas([large], [small]) as made:
            wait_until(made.all_ready)
            made.opened(height=128)
            blocking, behind = made.open(height=128), made.open()
            assert blocking.until(Waiting) == Waiting(1)
            made.engine.drain_replica(0)
            assert isinstance(blocking.rest()[-1].error, OutOfKVMemoryError)
            behind.until(Opened)
            with pytest.raises(OutOfKVMemoryError):
                made.open(height=128)

    def test_a_refused_drain_leaves_the_number_to_growth(self):
        with Replicas([FakeExecutor()], [FakeExecutor()], least=1) as made:
            with pytest.raises(InvalidRequestError, match="no replica 1"):
                made.engine.drain_replica(1)
            made.opened()
            assert _replica(made, made.opened()) == 1

    def test_a_drained_replica_that_loses_its_workers_gets_no_others(self):
        lost, unneeded = FakeExecutor(), FakeExecutor()
        with Replicas([lost, unneeded], [FakeExecutor()]) as made:
            wait_until(made.all_ready)
            victim = made.opened()
            made.engine.drain_replica(0)
            lost.dead = WorkerFailedError("rank 0 died")
            assert isinstance(victim.rest()[-1].error, WorkerRestartedError)
            wait_until(lambda: [one.number for one in made.engine.replicas()] == [1])
            assert unneeded.started == 0


class TestGrowth:
    def test_it_grows_while_somebody_waits_and_shrinks_when_idle(self):
        executors = [[FakeExecutor()], [FakeExecutor()], [FakeExecutor()]]
        with Replicas(*executors, least=1, idle_s=0.3) as made:
            readers = [made.opened(), made.open(), made.open()]
            for reader in readers[1:]:
                reader.until(Opened)
            assert made.sessions() == [1, 1, 1]
            waiting = made.open()
            assert waiting.until(Waiting) == Waiting(1)
            for reader in (*readers[1:], waiting):
                made.engine.stop(reader.session_id)
            wait_until(lambda: len(made.engine.replicas()) == 1)
            # Who plays is never cut.
            assert isinstance(readers[0].next(), ChunkReady)

    def test_it_grows_for_who_finds_a_place_but_no_pages(self):
        # A 128x96 session takes all 4 pages, of four places.
        executors = [[FakeExecutor(sessions=4)], [FakeExecutor(sessions=4)]]
        with Replicas(*executors, least=1) as made:
            made.opened(height=128)
            assert _replica(made, made.opened(height=128)) == 1

    def test_another_comes_for_one_that_is_lost(self):
        lost = FakeExecutor()
        with Replicas([lost, Broken()], [FakeExecutor()], [FakeExecutor()], least=2) as made:
            wait_until(lambda: [one.state for one in made.engine.replicas()] == ["ready"] * 2)
            lost.dead = WorkerFailedError("rank 0 died")
            wait_until(
                lambda: (
                    [one.state for one in made.engine.replicas()] == ["failed", "ready", "ready"]
                )
            )

    def test_an_idle_one_stays_where_the_other_was_lost_meanwhile(self, monkeypatch):
        with Replicas([FakeExecutor()], [FakeExecutor()], least=1, idle_s=0.1) as made:
            retire, asked = made.engine.retire_replica, []

            def refused_once(number: int) -> None:
                asked.append(number)
                if len(asked) == 1:
                    raise InvalidRequestError("the only one that serves")
                retire(number)

            monkeypatch.setattr(made.engine, "retire_replica", refused_once)
            readers = [made.opened(), made.opened()]
            for reader in readers:
                made.engine.stop(reader.session_id)
            wait_until(lambda: asked == [1, 1])

    @pytest.mark.parametrize(
        ("demand", "one_more", "one_less"),
        [
            (Demand(0, 1, 1, 0, 1, {0: (1, 99.0)}), False, None),
            (Demand(1, 0, 1, 0, 1, {}), True, None),
            (Demand(1, 0, 2, 1, 1, {}), False, None),
            (Demand(3, 0, 2, 1, 2, {}), True, None),
            (Demand(3, 0, 3, 0, 1, {}), False, None),
            (Demand(0, 2, 2, 0, 2, {1: (2, 9.0)}), False, None),
            (Demand(0, 4, 2, 0, 2, {0: (2, 11.0), 1: (2, 11.0)}), False, 1),
            (Demand(1, 4, 2, 0, 2, {0: (2, 11.0), 1: (2, 11.0)}), False, None),
        ],
    )
    def test_rules(self, demand, one_more, one_less):
        config = ReplicaConfig(1, 3, spare=0, idle_s=10.0)
        assert needs_one_more(config, demand) == one_more
        assert idle_replica(config, demand) == one_less

    def test_there_are_no_fewer_than_the_least(self):
        config = ReplicaConfig(2, 3)
        assert needs_one_more(config, Demand(0, 4, 1, 0, 4, {}))
        assert not needs_one_more(config, Demand(0, 4, 2, 1, 4, {}))

    def test_spare_places_are_kept(self):
        config = ReplicaConfig(1, 3, spare=2, idle_s=10.0)
        assert needs_one_more(config, Demand(0, 1, 1, 0, 2, {}))
        assert not needs_one_more(config, Demand(0, 2, 1, 0, 2, {}))
        assert idle_replica(config, Demand(0, 3, 2, 0, 2, {1: (2, 11.0)})) is None
        assert idle_replica(config, Demand(0, 4, 2, 0, 2, {1: (2, 11.0)})) == 1


class Broken(FakeExecutor):
    """Workers that do not come up."""

    def start(self):
        assert self.gate.wait(10)
        raise CheckpointError("a tensor is missing")


def _replica(made: Replicas, reader: Reader) -> int:
    session = made.engine._roster.find(reader.session_id)
    assert session is not None
    return session.replica
