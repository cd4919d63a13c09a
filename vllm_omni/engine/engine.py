"""The engine: sessions, and the thread that has the workers do what is next for them."""

from __future__ import annotations

import threading

from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.engine.metrics import EngineMetrics
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


class Engine(Scheduler):
    """A scheduler with the workers of one group.

    Clients call the methods of :class:`Scheduler`; the engine's own thread carries out its tasks,
    one at a time. Only :meth:`start` and :meth:`close` wait for workers.
    """

    def __init__(
        self, supervisor: WorkerSupervisor, metrics: EngineMetrics, *, max_queued: int
    ) -> None:
        super().__init__(metrics, max_queued=max_queued)
        self._supervisor = supervisor
        self._thread: threading.Thread | None = None

    def start(self) -> GroupCapacity:
        """Start and warm up the workers, then the engine's thread. Returns when sessions can run.

        Raises:
            OmniError: if the workers do not come up; every session in line has got the same error.
        """
        try:
            capacity = self._supervisor.start()
        except OmniError as error:
            if not self.draining:
                self.fail(error)
            raise
        except BaseException:
            self.fail(InternalError(_BUG))
            raise
        self.adopt(capacity)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        return capacity

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain, wait for the running chunk, end the workers; a second call does nothing.

        Args:
            timeout_s: how long to wait for the chunk before the workers are ended under it.
        """
        self.drain()
        if not self.has_group:
            self._supervisor.shutdown()  # No chunk runs: what is being started is not needed.
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        self._supervisor.shutdown()

    def _loop(self) -> None:
        try:
            while not self.is_over:
                try:
                    self._step()
                except WorkerFailedError as error:
                    self._recover(error)
        except BaseException:
            self.fail(InternalError(_BUG))
            raise

    def _step(self) -> None:
        """Have the workers carry out the next task, if there is one.

        Raises:
            WorkerFailedError: if the worker group is lost.
        """
        executor = self._supervisor.executor
        executor.check_alive()
        task = self.next_task()
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
                    timings = executor.run_chunk(plan, lambda made: self.chunk_made(task, made))
                    self.metrics.chunk_timed(timings)
                case RestartTask(session, request):
                    executor.close_session(session.session_id)
                    executor.open_session(session.session_id, request)
                    self.restarted(task)
        except WorkerFailedError:
            raise
        except OmniError as error:
            self.task_done(task.session, error)
        else:
            self.task_done(task.session)

    def _end_on_workers(self, task: EndTask) -> None:
        """Close a session on the workers, then tell its client, also if the workers are lost."""
        executor, peak_bytes = self._supervisor.executor, 0
        try:
            executor.close_session(task.session.session_id)
            if task.reason is EndReason.FINISHED:
                peak_bytes = executor.peak_bytes()
        finally:
            self.tell_end(task.session, task.reason, task.error, peak_bytes=peak_bytes)

    def _recover(self, error: WorkerFailedError) -> None:
        """End the sessions that held a place and relaunch the workers; without success, fail."""
        logger.error("worker group lost: %s", error)
        self.lose_group(error)
        if self.draining:
            return
        self.metrics.worker_restarts.inc()
        try:
            capacity = self._supervisor.relaunch()
        except OmniError as final:
            if not self.draining:
                logger.critical("%s", final)
                self.fail(final)
            return
        self.adopt(capacity)
