"""One worker group and the thread that has it do what is next for its sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import (
    ChunkTask,
    EndReason,
    EndTask,
    OpenTask,
    RestartTask,
)
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import InternalError, OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_BUG = "the engine stopped by a bug of its own; see its log"


class Replica:
    """Carries out the tasks that the scheduler has for one worker group, one at a time.

    Args:
        number: which replica of the scheduler's it is.
    """

    def __init__(self, number: int, supervisor: WorkerSupervisor, scheduler: Scheduler) -> None:
        self.number = number
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the replica's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start and warm up the workers, then the replica's thread.

        Raises:
            OmniError: if the workers do not come up; the scheduler knows that the replica is lost.
        """
        self._start_workers()
        self._begin(self._loop)

    def start_beside(self) -> None:
        """Start the replica's thread, which begins with the workers. Returns at once."""
        self._begin(self._start_and_loop)

    def shut_down(self, timeout_s: float) -> None:
        """Wait for the running task, then end the workers; a second call does nothing.

        Args:
            timeout_s: how long to wait for the task before the workers are ended under it.
        """
        if not self._scheduler.has_workers(self.number):
            self._supervisor.shutdown()  # No chunk runs: what is being started is not needed.
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        self._supervisor.shutdown()

    def _begin(self, work: Callable[[], None]) -> None:
        name = "engine" if self.number == 0 else f"engine {self.number}"
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def _start_workers(self) -> None:
        try:
            capacity = self._supervisor.start()
        except OmniError as error:
            if not self._scheduler.draining:
                self._scheduler.lose_replica(error, self.number)
            raise
        except BaseException:
            self._scheduler.lose_replica(InternalError(_BUG), self.number)
            raise
        self._scheduler.adopt(capacity, self.number)

    def _start_and_loop(self) -> None:
        try:
            self._start_workers()
        except OmniError as error:
            logger.critical("replica %d did not start: %s", self.number, error)
            return
        self._loop()

    def _loop(self) -> None:
        try:
            while not self._scheduler.is_over(self.number):
                try:
                    self._step()
                except WorkerFailedError as error:
                    self._recover(error)
        except BaseException:
            self._scheduler.lose_replica(InternalError(_BUG), self.number)
            raise

    def _step(self) -> None:
        """Have the workers carry out the next task, if there is one.

        Raises:
            WorkerFailedError: if the worker group is lost.
        """
        executor, scheduler = self._supervisor.executor, self._scheduler
        executor.check_alive()
        task = scheduler.next_task(self.number)
        if task is None:
            return
        if isinstance(task, EndTask):
            self._end_on_workers(task)
            return
        try:
            match task:
                case OpenTask(session):
                    executor.open_session(session.session_id, session.request)
                case ChunkTask(plan=plan):
                    timings = executor.run_chunk(
                        plan, lambda made: scheduler.chunk_made(task, made)
                    )
                    scheduler.metrics.chunk_timed(self.number, timings)
                case RestartTask(session, request):
                    executor.open_session(session.session_id, request)
                    scheduler.restarted(task)
        except WorkerFailedError:
            raise
        except OmniError as error:
            scheduler.task_done(task.session, error)
        else:
            scheduler.task_done(task.session)

    def _end_on_workers(self, task: EndTask) -> None:
        """Close a session on the workers, then tell its client, also if the workers are lost."""
        executor, peak_bytes = self._supervisor.executor, 0
        try:
            executor.close_session(task.session.session_id)
            if task.reason is EndReason.FINISHED:
                peak_bytes = executor.peak_bytes()
        finally:
            self._scheduler.tell_end(task.session, task.reason, task.error, peak_bytes=peak_bytes)

    def _recover(self, error: WorkerFailedError) -> None:
        """End the sessions that held a place and relaunch the workers, if others are to come.

        Without success, the replica is given up.
        """
        scheduler = self._scheduler
        logger.error("worker group lost: %s", error)
        scheduler.lose_group(error, self.number)
        if scheduler.is_over(self.number):
            return
        scheduler.metrics.group_lost(self.number)
        try:
            capacity = self._supervisor.relaunch()
        except OmniError as final:
            if not scheduler.draining:
                logger.critical("%s", final)
                scheduler.lose_replica(final, self.number)
            return
        scheduler.adopt(capacity, self.number)
