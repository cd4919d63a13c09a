"""The loop: pick a session at a chunk boundary, plan, execute, hand out. One thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from vllm_omni.diffusion.messages import SessionRequest, WorkerReady
from vllm_omni.engine.chunk_maker import ChunkMaker
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.engine.journal import Journal
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.roster import Roster
from vllm_omni.engine.session import (
    EndReason,
    EngineSession,
    Opened,
    SessionOptions,
    SessionStatus,
    Sink,
    StopCause,
)
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import (
    OmniError,
    OutOfKVMemoryError,
    WorkerFailedError,
    WorkerRestartedError,
)
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_IDLE_CHECK_S = 1.0
_BUG = "the engine stopped by a bug of its own; see its log"


class Engine:
    """Runs all sessions of one worker group.

    Public methods may be called from any thread; only :meth:`start` and :meth:`close` wait for
    workers.
    """

    def __init__(
        self, supervisor: WorkerSupervisor, metrics: EngineMetrics, *, max_queued: int
    ) -> None:
        self.metrics = metrics
        self._journal = Journal(metrics)
        self._supervisor = supervisor
        self._roster = Roster(supervisor, self._journal, max_queued=max_queued)
        self._scheduler = self._roster.scheduler
        self._lock = self._roster.lock
        self._maker = ChunkMaker(supervisor, metrics, self._journal, lock=self._lock)
        self._called = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ called by the client's side

    def start(self) -> WorkerReady:
        """Start and warm up the workers, then the loop. Blocks until ready.

        Raises:
            OmniError: if they do not come up; every session in line has got the same error.
        """
        try:
            ready = self._supervisor.start()
        except OmniError as error:
            if not self._roster.draining:
                self._roster.fail(error)
            raise
        except BaseException:
            self._roster.fail(WorkerFailedError(_BUG))
            raise
        self._adopt(ready)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        return ready

    @property
    def failure(self) -> OmniError | None:
        """What the engine was lost by, for good."""
        return self._roster.failure

    @property
    def unready_reason(self) -> str | None:
        """``loading``, ``restarting``, ``draining``, or what the engine was lost by.

        ``None`` while sessions can be opened and served.
        """
        if self.failure is not None:
            return str(self.failure)
        if self._roster.draining:
            return "draining"
        if self._scheduler.has_group:
            return None
        return "loading" if self._thread is None else "restarting"

    @property
    def num_sessions(self) -> int:
        """Sessions on the workers and in line."""
        with self._lock:
            return len(self._scheduler.sessions)

    @property
    def max_sessions(self) -> int:
        """Sessions that the workers hold at once."""
        return self._scheduler.max_sessions

    def is_waiting(self, session_id: str) -> bool:
        """Whether a session stands in line."""
        with self._lock:
            session = self._scheduler.find(session_id)
            return session is not None and session.status is SessionStatus.WAITING

    def open(
        self,
        request: SessionRequest,
        sink: Sink,
        options: SessionOptions | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Put a session in line.

        Args:
            request_id: what the client knows the session by, for the log.

        Returns:
            Its id.

        Raises:
            OutOfKVMemoryError: if its window can never fit.
            ServerFullError: if the line is full.
            SessionClosedError: if the engine is shutting down.
        """
        session = EngineSession(
            uuid.uuid4().hex,
            request,
            sink,
            options=options or SessionOptions(),
            now_s=time.monotonic(),
            request_id=request_id,
        )
        with self._lock:
            self._roster.add(session)
            self._call()
        return session.session_id

    def submit(self, session_id: str, event: ControlEvent) -> None:
        """Queue a client event for the next chunk boundary of a session.

        Raises:
            SessionClosedError: if there is no such session; none is created.
            EventConflictError, InteractionError: see :meth:`InteractionBox.submit`.
        """
        with self._lock:
            session = self._roster.session(session_id)
        session.interactions.submit(event, time.monotonic())

    def stop(self, session_id: str, cause: StopCause = StopCause.DISCONNECTED) -> None:
        """End a session at its next chunk boundary; one that has ended is no error.

        Args:
            cause: what the session is counted as; of several, the first. By default whoever
                wanted it has left.
        """
        with self._lock:
            session = self._scheduler.find(session_id)
            if session is None or session.stop_cause is not None:
                return
            self._journal.stopped(session, cause)
            self._call()
        self._roster.end_without_loop()

    def reset(self, session_id: str, change: Callable[[SessionRequest], SessionRequest]) -> None:
        """Restart a session from chunk 0 at its next chunk boundary.

        Args:
            change: makes the new request of the one with the current prompt.
        """
        with self._lock:
            self._roster.session(session_id).add_reset(change)
            self._call()

    def delivered(self, session_id: str) -> None:
        """Say that the client has taken one chunk."""
        with self._lock:
            session = self._scheduler.find(session_id)
            if session is not None:
                session.delivered(time.monotonic())
                self._call()

    def drain(self) -> None:
        """Refuse new sessions, finish the running chunk, end all sessions with an error."""
        with self._lock:
            self._roster.drain()
            self._call()
        self._roster.end_without_loop()

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain, wait for the loop, end the workers; a second call does nothing."""
        self.drain()
        if not self._scheduler.has_group:
            self._supervisor.shutdown()  # No chunk runs: what is being started is not needed.
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        self._supervisor.shutdown()

    # ------------------------------------------------------------ the engine's thread

    def _loop(self) -> None:
        try:
            while self._try_step():
                pass
        except BaseException:
            self._roster.fail(WorkerFailedError(_BUG))
            raise

    def _try_step(self) -> bool:
        try:
            return self._step()
        except WorkerFailedError as error:
            return self._recover(error)

    def _step(self) -> bool:
        """Do one thing; false when there is nothing left to do, ever."""
        with self._lock:
            self._called = False
            sessions, draining = self._scheduler.sessions, self._roster.draining
        self._roster.end_due(sessions)
        if draining:
            return False
        self._supervisor.executor.check_alive()
        if self._place_next():
            return True
        with self._lock:
            session = self._scheduler.pick(time.monotonic())
            if session is None:
                self._wait()
                return True
            session.move_to(SessionStatus.RUNNING)
        self._advance(session)
        return True

    def _wait(self) -> None:
        """Sleep until a call wakes the loop or a paced session may go on. Holds the lock.

        Not for long: a worker that dies while nobody asks it anything is looked for.
        """
        if self._called:
            return
        wake_at = self._scheduler.wake_at_s()
        due_s = _IDLE_CHECK_S if wake_at is None else wake_at - time.monotonic()
        self._lock.wait(min(max(due_s, 0.0), _IDLE_CHECK_S))

    def _place_next(self) -> bool:
        with self._lock:
            session = self._scheduler.next_to_place()
        if session is None:
            return False
        try:
            self._supervisor.executor.open_session(session.session_id, session.request)
        except WorkerFailedError as error:
            # Not tried again: if it is the cause, it would cost every new group.
            self._roster.end(session, EndReason.FAILED, _restarted(error))
            raise
        except OutOfKVMemoryError as error:
            if not self._scheduler.placed:
                self._roster.end(session, EndReason.FAILED, error)
                return True
            self._roster.put_off(session)
            return False
        except OmniError as error:
            self._roster.end(session, EndReason.FAILED, error)
            return True
        self._roster.place(session)
        self._journal.placed(session)
        session.emit(Opened(time.monotonic()))
        return True

    def _advance(self, session: EngineSession) -> None:
        try:
            self._maker.advance(session)
        except WorkerFailedError:
            raise
        except OmniError as error:
            self._roster.end(session, EndReason.FAILED, error)
            return
        if session.finished:
            self._roster.end(session, EndReason.FINISHED)
            return
        with self._lock:
            session.move_to(SessionStatus.OPEN)

    def _recover(self, error: WorkerFailedError) -> bool:
        """Fail the sessions that held a place and relaunch the workers; false to give up."""
        logger.error("worker group lost: %s", error)
        self._roster.lose_group()
        if self._roster.draining:
            return True  # The next step ends everybody; that needs no group.
        for session in self._scheduler.placed:
            self._roster.end(session, EndReason.FAILED, _restarted(error))
        self.metrics.worker_restarts.inc()
        try:
            ready = self._supervisor.relaunch()
        except OmniError as final:
            if not self._roster.draining:
                logger.critical("%s", final)
                self._roster.fail(final)
            return self._roster.draining
        self._adopt(ready)
        return True

    # ------------------------------------------------------------ helpers

    def _call(self) -> None:
        """Have the loop look again, also if it is not waiting yet. Holds the lock."""
        self._called = True
        self._lock.notify()

    def _adopt(self, ready: WorkerReady) -> None:
        self._roster.adopt(ready)
        self._journal.group_ready(ready)


def _restarted(error: WorkerFailedError) -> WorkerRestartedError:
    return WorkerRestartedError(f"the workers were restarted: {error}")
