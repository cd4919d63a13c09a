"""The engine: sessions, and the replicas that do what is next for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_omni.diffusion.data import ReplicaConfig
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.replica import Replica
from vllm_omni.engine.roster import Demand
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import InvalidRequestError, OmniError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_LOOK_S = 0.2
"""Between two looks at the number of replicas."""


class Engine(Scheduler):
    """A scheduler with its replicas: one worker group each, and the thread that commands it.

    Clients call the methods of :class:`Scheduler`. Only :meth:`start` and :meth:`close` wait for
    workers.

    Args:
        make_supervisor: makes the supervisor of the replica with a number.
        config: how many replicas there are.
    """

    def __init__(
        self,
        make_supervisor: Callable[[int], WorkerSupervisor],
        metrics: EngineMetrics,
        *,
        max_queued: int,
        config: ReplicaConfig | None = None,
    ) -> None:
        super().__init__(metrics, max_queued=max_queued)
        self._make_supervisor = make_supervisor
        self._config = config or ReplicaConfig()
        self._replicas = {0: Replica(0, make_supervisor(0), self)}
        self._drained: set[int] = set()
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Start and warm up the workers of all replicas. Returns when sessions can run.

        Raises:
            OmniError: if no replica comes up; every session in line has got the same error.
        """
        for number in range(1, self._config.num_replicas):
            self._add(number)
        try:
            self._replicas[0].start()
        except OmniError as error:
            if self.failure is not None or self.draining:
                raise
            logger.critical("replica 0 did not start: %s", error)
            self._begin_keeping()
            self._wait_for_another()
        else:
            self._begin_keeping()

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain, wait for the running chunks, end the workers; a second call does nothing.

        Args:
            timeout_s: how long to wait for the chunks before the workers are ended under them.
        """
        self.drain()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        enders = [
            threading.Thread(target=replica.shut_down, args=(timeout_s,), name="replica end")
            for replica in self._replicas.values()
        ]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def drain_replica(self, number: int) -> None:
        """Give a replica no new session; it ends for good with the last that it has.

        Raises:
            InvalidRequestError: if there is no such replica, or no other one that serves.
        """
        if self._config.most == 1:
            raise InvalidRequestError("there is one replica; end the server instead")
        newly = number not in self._drained
        # Before it ends: its number must not be used again in between.
        self._drained.add(number)
        try:
            self.retire_replica(number)
        except InvalidRequestError:
            if newly:
                self._drained.discard(number)
            raise
        logger.info("replica %d: draining", number)

    def _add(self, number: int) -> None:
        self.add_replica(number)
        self._replicas[number] = Replica(number, self._make_supervisor(number), self)
        self._replicas[number].start_beside()

    def _wait_for_another(self) -> None:
        """Wait until a replica serves; raises OmniError if none comes up."""
        while self.unready_reason is not None and not self.draining:
            if self.failure is not None:
                raise self.failure
            time.sleep(_LOOK_S)

    def _begin_keeping(self) -> None:
        if self._config.most > 1:
            self._keeper = threading.Thread(
                target=self._keep_replicas, name="replicas", daemon=True
            )
            self._keeper.start()

    def _keep_replicas(self) -> None:
        """Remove replicas that have ended; start and retire others as sessions come and go."""
        while not self.draining and self.failure is None:
            self._remove_ended()
            demand, unused = self.demand(), self._unused_number()
            if unused is None:
                self.end_if_lost()
            if unused is not None and needs_one_more(self._config, demand):
                logger.info("%d wait: starting replica %d", demand.waiting, unused)
                self._add(unused)
            elif (number := idle_replica(self._config, demand)) is not None:
                self._retire_idle(number)
            time.sleep(_LOOK_S)

    def _retire_idle(self, number: int) -> None:
        try:
            self.retire_replica(number)
        except InvalidRequestError as error:
            logger.info("replica %d is idle, but stays: %s", number, error)
        else:
            logger.info("replica %d: idle, ends", number)

    def _unused_number(self) -> int | None:
        """The lowest number, and with it the devices, that no replica uses; drained ones rest."""
        used = self._replicas.keys() | self._drained
        return next((number for number in range(self._config.most) if number not in used), None)

    def _remove_ended(self) -> None:
        for status in self.replicas():
            replica = self._replicas[status.number]
            if status.state == "draining" and not replica.is_running:
                replica.shut_down(0.0)
                del self._replicas[status.number]
                self.remove_replica(status.number)
                logger.info("replica %d: ended", status.number)


def needs_one_more(config: ReplicaConfig, demand: Demand) -> bool:
    """Whether the replicas are too few, or the free places and those that are coming."""
    wanted = demand.waiting + config.spare
    coming = demand.free + demand.coming * demand.places_each
    too_few = wanted > coming or demand.alive < config.num_replicas
    return too_few and demand.alive < config.most


def idle_replica(config: ReplicaConfig, demand: Demand) -> int | None:
    """Return the replica that may end, the one with the highest number; ``None`` for none."""
    if demand.waiting or demand.coming or demand.alive <= config.num_replicas:
        return None
    idle = [
        replica
        for replica, (places, idle_s) in demand.idle.items()
        if idle_s >= config.idle_s and demand.free - places >= config.spare
    ]
    return max(idle, default=None)
