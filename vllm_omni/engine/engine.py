"""The loop: pick a session at a chunk boundary, plan, execute, hand out. One thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    LiveCamera,
    SessionRequest,
    WorkerReady,
)
from vllm_omni.engine.interactions import FoldedChunk, Interaction, InteractionBox
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import (
    ChunkReady,
    Ended,
    EndReason,
    EngineSession,
    Opened,
    SessionOptions,
    SessionStatus,
    Sink,
    WasReset,
)
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import (
    OmniError,
    OutOfKVMemoryError,
    SessionClosedError,
    WorkerFailedError,
    WorkerRestartedError,
)
from vllm_omni.logger import get_logger

logger = get_logger(__name__)


class Engine:
    """Runs all sessions of one worker group.

    Public methods may be called from any thread; only :meth:`start` and :meth:`close` wait for
    workers.
    """

    def __init__(
        self, supervisor: WorkerSupervisor, metrics: EngineMetrics, *, max_queued: int
    ) -> None:
        self.metrics = metrics
        self._supervisor = supervisor
        self._max_queued = max_queued
        self._wake = threading.Condition()
        self._called = False
        self._sessions: dict[str, EngineSession] = {}
        self._scheduler = Scheduler(max_sessions=0, max_queued=max_queued)
        self._ready: WorkerReady | None = None
        self._draining = False
        self._thread: threading.Thread | None = None
        self.failure: OmniError | None = None

    # ------------------------------------------------------------ called by the client's side

    def start(self) -> WorkerReady:
        """Start and warm up the workers, then the loop. Blocks until ready."""
        ready = self._supervisor.start()
        self._adopt(ready)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        return ready

    @property
    def is_ready(self) -> bool:
        """Whether sessions can be opened and served now."""
        return self._ready is not None and self.failure is None and not self._draining

    @property
    def num_sessions(self) -> int:
        """Sessions on the workers and in line."""
        return len(self._sessions)

    @property
    def max_sessions(self) -> int:
        """Sessions that the workers hold at once."""
        return self._scheduler.max_sessions

    def is_waiting(self, session_id: str) -> bool:
        """Whether a session stands in line."""
        with self._wake:
            session = self._sessions.get(session_id)
            return session is not None and session.status is SessionStatus.WAITING

    def open(
        self, request: SessionRequest, sink: Sink, options: SessionOptions | None = None
    ) -> str:
        """Put a session in line.

        Returns:
            Its id.

        Raises:
            OutOfKVMemoryError: if its window can never fit.
            ServerFullError: if the line is full.
            SessionClosedError: if the engine is shutting down.
        """
        now = time.monotonic()
        session_id = uuid.uuid4().hex
        session = EngineSession(
            session_id,
            request,
            sink,
            options=options or SessionOptions(),
            interactions=InteractionBox(
                request.prompt, live_camera=isinstance(request.camera, LiveCamera), opened_s=now
            ),
            now_s=now,
        )
        with self._wake:
            self._check_open()
            self._check_fits(request)
            self._scheduler.enqueue(session)
            self._sessions[session_id] = session
            self._scheduler.announce_positions()
            self._count_sessions()
            self._call()
        return session_id

    def submit(self, session_id: str, interaction: Interaction) -> None:
        """Queue a client event for the next chunk boundary of a session.

        Raises:
            SessionClosedError: if there is no such session; none is created.
            EventConflictError, InteractionError: see :meth:`InteractionBox.submit`.
        """
        with self._wake:
            session = self._session(session_id)
        session.interactions.submit(interaction, time.monotonic())

    def stop(self, session_id: str) -> None:
        """End a session at its next chunk boundary; one that has ended is no error."""
        with self._wake:
            if session_id in self._sessions:
                self._sessions[session_id].stop_requested = True
                self._call()

    def reset(self, session_id: str, change: Callable[[SessionRequest], SessionRequest]) -> None:
        """Restart a session from chunk 0 at its next chunk boundary.

        Args:
            change: makes the new request of the one with the current prompt.
        """
        with self._wake:
            self._session(session_id).add_reset(change)
            self._call()

    def delivered(self, session_id: str) -> None:
        """Say that the client has taken one chunk."""
        with self._wake:
            if session_id in self._sessions:
                self._sessions[session_id].undelivered -= 1
                self._call()

    def drain(self) -> None:
        """Refuse new sessions, finish the running chunk, end all sessions with an error."""
        with self._wake:
            self._draining = True
            self._call()

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain, wait for the loop, end the workers; a second call does nothing."""
        self.drain()
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
            self._fail(WorkerFailedError("the engine stopped by a bug of its own; see its log"))
            raise

    def _try_step(self) -> bool:
        try:
            return self._step()
        except WorkerFailedError as error:
            return self._recover(error)

    def _step(self) -> bool:
        """Do one thing; false when there is nothing left to do, ever."""
        with self._wake:
            self._called = False
            ending = [s for s in self._scheduler.sessions if s.stop_requested or self._draining]
        for session in ending:
            if session.stop_requested:
                self._end(session, EndReason.STOPPED)
            else:
                closing = SessionClosedError("the server is shutting down")
                self._end(session, EndReason.FAILED, closing)
        if self._draining:
            return False
        if self._place_next():
            return True
        with self._wake:
            session = self._scheduler.pick(time.monotonic())
            if session is None:
                self._wait()
                return True
            session.move_to(SessionStatus.RUNNING)
        self._advance(session)
        return True

    def _wait(self) -> None:
        """Sleep until a call wakes the loop or a paced session may go on. Holds the lock."""
        if self._called:
            return
        wake_at = self._scheduler.wake_at_s()
        self._wake.wait(None if wake_at is None else max(wake_at - time.monotonic(), 0.0))

    def _place_next(self) -> bool:
        with self._wake:
            session = self._scheduler.next_to_place()
        if session is None:
            return False
        try:
            self._supervisor.executor.open_session(session.session_id, session.request)
        except WorkerFailedError:
            raise
        except OmniError as error:
            if isinstance(error, OutOfKVMemoryError) and self._scheduler.placed:
                return False
            self._end(session, EndReason.FAILED, error)
            return True
        with self._wake:
            self._scheduler.place(session)
            session.move_to(SessionStatus.OPEN)
            self._scheduler.announce_positions()
            self._count_sessions()
        self.metrics.queue_wait_s.observe(time.monotonic() - session.arrived_s)
        session.emit(Opened(time.monotonic()))
        return True

    def _advance(self, session: EngineSession) -> None:
        """Make one chunk of a session, or restart it."""
        make = self._restart if session.resets else self._run_chunk
        try:
            make(session)
        except WorkerFailedError:
            raise
        except OmniError as error:
            self._end(session, EndReason.FAILED, error)
            return
        if session.finished:
            self._end(session, EndReason.FINISHED)
            return
        with self._wake:
            session.move_to(SessionStatus.OPEN)

    def _restart(self, session: EngineSession) -> None:
        with self._wake:
            request = session.request_after_resets()
        self._supervisor.executor.close_session(session.session_id)
        self._supervisor.executor.open_session(session.session_id, request)
        session.restart(request, time.monotonic())
        session.emit(WasReset())

    def _run_chunk(self, session: EngineSession) -> None:
        now = time.monotonic()
        index = session.chunks_made
        folded = session.interactions.fold(index * LATENT_FRAMES_PER_CHUNK, now)
        plan = ChunkPlan(session.session_id, index, poses=folded.poses, prompt=folded.prompt)
        timings = self._supervisor.executor.run_chunk(
            plan, lambda result: self._hand_out(session, result, folded)
        )
        self.metrics.chunk_timed(timings)

    def _hand_out(self, session: EngineSession, result: ChunkResult, folded: FoldedChunk) -> None:
        if session.chunks_made == 0:
            self.metrics.ttfc_s.observe(result.ready_s - session.began_s)
        else:
            self.metrics.chunk_interval_s.observe(result.ready_s - session.last_chunk_s)
            if result.ready_s > session.deadline_s:
                self.metrics.deadline_misses.inc()
        self.metrics.chunks.inc()
        with self._wake:
            session.chunk_made(result.ready_s)
        session.emit(ChunkReady(result, folded.receipt, last=session.finished))

    def _end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None = None
    ) -> None:
        """The one way out for every session: free, forget, count, tell."""
        with self._wake:
            placed = session.status is not SessionStatus.WAITING
            self._scheduler.remove(session)
            del self._sessions[session.session_id]
            session.move_to(SessionStatus.CLOSED)
            self._scheduler.announce_positions()
            self._count_sessions()
        self.metrics.e2e_latency_s.observe(time.monotonic() - session.arrived_s)
        if error is None:
            self.metrics.succeeded(reason)
        else:
            self.metrics.failed("stage_error")
        peak_bytes = 0
        try:
            if placed and not isinstance(error, WorkerRestartedError):
                executor = self._supervisor.executor
                executor.close_session(session.session_id)
                peak_bytes = executor.peak_bytes() if reason is EndReason.FINISHED else 0
                self.metrics.peak_memory(peak_bytes)
        finally:
            session.emit(Ended(reason, error, peak_bytes))

    def _recover(self, error: WorkerFailedError) -> bool:
        """Fail the sessions that held a place and relaunch the workers; false to give up."""
        logger.error("worker group lost: %s", error)
        self._ready = None
        self.metrics.worker_restarts.inc()
        lost = WorkerRestartedError(f"the workers were restarted: {error}")
        for session in self._scheduler.placed:
            self._end(session, EndReason.FAILED, lost)
        if self._draining:
            return True  # The next step ends who stands in line; that needs no group.
        try:
            ready = self._supervisor.relaunch()
        except OmniError as final:
            if not self._draining:
                logger.critical("%s", final)
                self._fail(final)
            return self._draining
        with self._wake:
            self._adopt(ready)
        return True

    def _fail(self, error: OmniError) -> None:
        """End everything for good."""
        with self._wake:
            self.failure = error
            sessions = self._scheduler.sessions
        for session in sessions:
            self._end(session, EndReason.FAILED, WorkerRestartedError(str(error)))

    # ------------------------------------------------------------ helpers

    def _call(self) -> None:
        """Have the loop look again, also if it is not waiting yet. Holds the lock."""
        self._called = True
        self._wake.notify()

    def _adopt(self, ready: WorkerReady) -> None:
        self._ready = ready
        self._scheduler.max_sessions = ready.sessions
        self.metrics.max_sessions.set(ready.sessions)
        self.metrics.kv_bytes.set(ready.num_pages * ready.page_bytes)

    def _session(self, session_id: str) -> EngineSession:
        if session_id not in self._sessions:
            raise SessionClosedError(f"there is no session {session_id}")
        return self._sessions[session_id]

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._draining:
            raise SessionClosedError("the server is shutting down")

    def _check_fits(self, request: SessionRequest) -> None:
        ready = self._ready
        if ready is None:
            return
        needed = _pages(ready, request)
        if needed > ready.num_pages:
            raise OutOfKVMemoryError(
                f"{request.width}x{request.height} needs {needed * ready.page_bytes} bytes of KV "
                f"window, the pool has {ready.num_pages * ready.page_bytes}; ask for less, or "
                "raise ar_diffusion_height and ar_diffusion_width, max_num_seqs or "
                "gpu_memory_fraction"
            )

    def _count_sessions(self) -> None:
        self.metrics.running.set(len(self._scheduler.placed))
        self.metrics.waiting.set(len(self._scheduler.waiting))
        if self._ready is not None:
            used = sum(_pages(self._ready, s.request) for s in self._scheduler.placed)
            self.metrics.kv_used_bytes.set(used * self._ready.page_bytes)


def _pages(ready: WorkerReady, request: SessionRequest) -> int:
    """Pages that a session takes."""
    return ready.pages_for(VideoGeometry(request.height, request.width).tokens_per_frame)
