"""Sessions come and go over three replicas that are killed and drained under them."""

import gc
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.helpers import drawn_world
from tests.helpers.fake_executor import FakeExecutor, make_request
from tests.helpers.faults import process_ids
from tests.helpers.local_server import wait_until
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.data import ReplicaConfig
from vllm_omni.diffusion.executor import Executor
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import Ended, EndReason, EngineSession, SessionEvent, SessionStatus
from vllm_omni.engine.supervisor import MAX_RESTARTS, WorkerSupervisor
from vllm_omni.errors import InvalidRequestError, WorkerFailedError, WorkerRestartedError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

SERVING, DRAINS = 3, 3
KILLS = 12
LINE = 8


class Churn:
    """An engine of three replicas; one that is drained is made up for by the next number.

    Args:
        make_executor: of two places.
        patience_s: how long a wait may take.
    """

    def __init__(
        self,
        make_executor: Callable[[], Executor] = lambda: FakeExecutor(sessions=2),
        patience_s: float = 20.0,
    ) -> None:
        self.executors: dict[int, Executor] = {}
        self.retired: list[Executor] = []
        self._make_executor, self._patience_s = make_executor, patience_s
        self.ended: dict[str, list[Ended]] = {}
        self.kills: Counter[int] = Counter()
        config = ReplicaConfig(SERVING, SERVING + DRAINS)
        metrics = EngineMetrics("m", by_replica=True)
        self.engine = Engine(self._supervisor, metrics, max_queued=LINE, config=config)

    def _supervisor(self, replica: int) -> WorkerSupervisor:
        def make() -> Executor:
            if replica in self.executors:
                self.retired.append(self.executors[replica])
            self.executors[replica] = self._make_executor()
            return self.executors[replica]

        return WorkerSupervisor(make, warm_up=None, sleep=lambda _: None)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, patience_s=self._patience_s)

    def serving(self) -> list[int]:
        return [one.number for one in self.engine.replicas() if one.state == "ready"]

    def open(self, num_chunks: int) -> str:
        """A session of at most as many chunks as may wait for a client that takes none."""
        self.wait(lambda: self.engine.num_waiting < LINE)
        events: list[Ended] = []

        def sink(event: SessionEvent) -> None:
            if isinstance(event, Ended):
                events.append(event)

        session_id = self.engine.open(make_request(num_chunks=num_chunks), sink)
        self.ended[session_id] = events
        return session_id

    def kill_one(self, chance: random.Random) -> None:
        """Kill the workers of a replica, of none so often that it would be given up."""
        alive = [number for number in self.serving() if self.kills[number] < MAX_RESTARTS]
        for number in chance.sample(alive, min(1, len(alive))):
            self.kills[number] += 1
            match self.executors[number]:
                case FakeExecutor() as executor:
                    executor.dead = WorkerFailedError("rank 0 died")
                case MultiprocExecutor() as executor:
                    with suppress(WorkerFailedError, ProcessLookupError):  # It has ended already.
                        os.kill(process_ids(executor.group)[0], signal.SIGKILL)

    def drain_one(self, chance: random.Random) -> bool:
        ready = self.serving()
        try:
            self.engine.drain_replica(chance.choice(ready))
        except (IndexError, InvalidRequestError):  # All of them or all others are being restarted.
            return False
        return True


@pytest.fixture
def placed(monkeypatch):
    """Sessions in the order in which they got a place, noted under the engine's lock."""
    order: list[str] = []
    move = EngineSession.move_to

    def noted(session: EngineSession, status: SessionStatus) -> None:
        if status is SessionStatus.OPENING:
            order.append(session.session_id)
        move(session, status)

    monkeypatch.setattr(EngineSession, "move_to", noted)
    return order


def stir(churn: Churn, placed: list[str], sessions: int) -> None:
    """Bring so many sessions to their end under kills and drains; check line, ends and places."""
    chance = random.Random(5)
    churn.engine.start()
    churn.wait(lambda: len(churn.serving()) == SERVING)
    kills = set(chance.sample(range(sessions), KILLS))
    drains = {sessions * part // (DRAINS + 1) for part in range(1, DRAINS + 1)}
    for number in range(sessions):
        churn.open(chance.choice([1, 2]))
        if number in kills:
            churn.kill_one(chance)
        if number in drains:
            churn.wait(lambda: churn.drain_one(chance))
        time.sleep(chance.uniform(0, 0.002))
    churn.wait(lambda: churn.engine.num_sessions == 0 and all(churn.ended.values()))
    churn.wait(lambda: len(churn.engine.replicas()) == len(churn.serving()) == SERVING)
    assert placed == list(churn.ended)  # Dictionaries keep the order of arrival.
    ends = Counter(end.reason for (end,) in churn.ended.values())
    assert ends[EndReason.FINISHED] >= sessions - 2 * KILLS  # Two places a replica.
    assert ends.total() == sessions
    errors = {type(end.error) for (end,) in churn.ended.values()} - {type(None)}
    assert errors <= {WorkerRestartedError}
    assert all(one.sessions == 0 for one in churn.engine.replicas())
    print(f"{sessions} sessions, {len(churn.retired)} restarts, {DRAINS} drains: {ends}")


def alive(session_ids: set[str]) -> list[EngineSession]:
    """Those of the sessions that something still holds.

    Other tests of this process may have left theirs, and what a thread's last frame holds goes with
    the thread, so the caller waits.
    """
    gc.collect()
    every = [one for one in gc.get_objects() if type(one) is EngineSession]
    return [one for one in every if one.session_id in session_ids]


def wait_until_forgotten(churn: Churn) -> None:
    session_ids = set(churn.ended)
    churn.ended.clear()  # Errors hold what they passed.
    churn.wait(lambda: not alive(session_ids))


@pytest.mark.parametrize("sessions", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_nothing_is_left_and_the_line_stays_in_order(placed, sessions):
    churn, threads = Churn(), threading.active_count()
    stir(churn, placed, sessions)
    live = [churn.executors[number] for number in churn.serving()]
    assert [(one.open_ids, one.opened_total == one.closed_total) for one in live] == [
        ([], True)
    ] * SERVING
    assert all(one.shut_down for one in churn.retired)
    # One thread for each replica and one that keeps their number.
    churn.wait(lambda: threading.active_count() == threads + SERVING + 1)
    churn.engine.close()
    assert threading.active_count() == threads
    wait_until_forgotten(churn)


@pytest.fixture
def unlogged():
    """pytest keeps what is logged, errors among it, and these hold the sessions they passed."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def held() -> tuple[set[int], set[str], int]:
    """Processes below this one, what lies in shared memory, and the number of descriptors."""
    here = psutil.Process()
    below = {one.pid for one in here.children(recursive=True)}
    return below, set(os.listdir("/dev/shm")), here.num_fds()


@pytest.mark.soak
@pytest.mark.timing
@pytest.mark.usefixtures("unlogged")
def test_nothing_is_left_of_worker_processes(placed, tmp_path, monkeypatch):
    home = drawn_world.write_home(tmp_path)
    monkeypatch.syspath_prepend(str(home / "package"))
    deployment = resolve(
        str(home / "model"), deploy_config=str(home / "deploy.yaml"), overrides={"max_num_seqs": 2}
    )
    first = MultiprocExecutor(deployment.config)  # The fork server stays.
    first.start()
    first.shutdown()
    before = held()
    churn = Churn(lambda: MultiprocExecutor(deployment.config), patience_s=120.0)
    stir(churn, placed, 500)
    churn.engine.close()
    wait_until_forgotten(churn)
    churn.wait(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
