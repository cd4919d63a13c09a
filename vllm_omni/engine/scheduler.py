"""Who waits, who has a place on the workers, and what the workers do next."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkResult, GroupCapacity, SessionRequest
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.engine.line import Line
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.places import Places
from vllm_omni.engine.session import (
    ChunkReady,
    ChunkTask,
    Ended,
    EndReason,
    EndTask,
    EngineSession,
    Opened,
    OpenTask,
    RestartTask,
    SessionOptions,
    SessionStatus,
    Sink,
    StopCause,
    Task,
    WasReset,
)
from vllm_omni.errors import (
    OmniError,
    OutOfKVMemoryError,
    ServerDrainingError,
    SessionClosedError,
    WorkerFailedError,
    WorkerRestartedError,
)

IDLE_CHECK_S = 1.0
"""Longest sleep of the thread that commands the workers: one may die while nobody needs it."""


class Scheduler:
    """The monitor over all sessions: one lock, which only this class can take.

    Places are given first come, first served. The order is strict: a small session never overtakes
    a large one, or the large one could wait for ever. Chunks are made for the session whose viewer
    needs one first.

    Clients call the first part of the methods, from any thread; none of them waits for workers. The
    second part is for the thread that commands the workers: it asks for a task, carries it out and
    says how it went. Public methods take the lock; private ones run under it.

    Args:
        max_queued: sessions that may wait for a place.

    Attributes:
        admits: whether new sessions are taken; without that, those that are here go on.
        draining: whether every session is to end.
        failure: the error that ended the engine permanently, or ``None``.
        quarantined: failures whose memory the workers keep until their process ends.
    """

    def __init__(self, metrics: EngineMetrics, *, max_queued: int) -> None:
        self.metrics = metrics
        # Two underscores: not even a subclass can take it.
        self.__lock = threading.Condition()
        self._places = Places()
        self._line = Line(self._places, max_queued=max_queued)
        self.admits = True
        self.draining = False
        self.failure: OmniError | None = None
        self.quarantined = 0

    # ------------------------------------------------------------ for clients

    @property
    def unready_reason(self) -> str | None:
        """``loading``, ``restarting``, ``draining``, or the error that ended the engine.

        ``None`` while sessions can be opened and served.
        """
        if self.failure is not None:
            return str(self.failure)
        if not self.admits:
            return "draining"
        if self.has_group:
            return None
        return "restarting" if self.max_sessions else "loading"

    @property
    def num_sessions(self) -> int:
        """Number of sessions on the workers and in line."""
        with self.__lock:
            return len(self._places) + len(self._line)

    @property
    def max_sessions(self) -> int:
        """Number of sessions that the workers hold at once, or that lost ones did."""
        return self._places.max_sessions

    def is_waiting(self, session_id: str) -> bool:
        """Whether a session has no place on the workers yet."""
        with self.__lock:
            session = self._find(session_id)
            return session is not None and session.is_waiting

    def check_fits(self, size: VideoGeometry) -> None:
        """Raise OutOfKVMemoryError for a size that the workers, where known, can never hold."""
        with self.__lock:
            self._places.check_fits(size)

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
            ServerDrainingError: if no new sessions are taken.
            OmniError: the failure, if the engine has ended.
        """
        session = EngineSession(
            uuid.uuid4().hex,
            request,
            sink,
            options=options or SessionOptions(),
            now_s=time.monotonic(),
            request_id=request_id,
        )
        with self.__lock:
            self._check_admits()
            self._places.check_fits(request.geometry)
            self._line.join(session)
            self._line_changed()
            self.__lock.notify()
        return session.session_id

    def submit(self, session_id: str, event: ControlEvent) -> None:
        """Queue a client event for the next chunk boundary of a session.

        Raises:
            SessionClosedError: if there is no such session; none is created.
            EventConflictError: if the event's id was used before.
            InteractionError: if the session cannot apply the event.
        """
        with self.__lock:
            self._require(session_id).interactions.submit(event, time.monotonic())

    def stop(self, session_id: str, cause: StopCause = StopCause.DISCONNECTED) -> None:
        """End a session at its next chunk boundary; one that has ended is no error.

        Args:
            cause: what the session is counted as; of several, the first. By default whoever
                wanted it has left.
        """
        with self.__lock:
            session = self._find(session_id)
            if session is None or session.stop_cause is not None:
                return
            session.stop_cause = cause
            self.metrics.stopped(cause)
            if session.status is SessionStatus.WAITING:
                self._end(session, EndReason.STOPPED)
            self.__lock.notify()

    def reset(self, session_id: str, change: Callable[[SessionRequest], SessionRequest]) -> None:
        """Restart a session from chunk 0 at its next chunk boundary.

        Args:
            change: makes the new request of the one with the current prompt.

        Raises:
            SessionClosedError: if there is no such session.
            InvalidRequestError: if too many resets wait already.
        """
        with self.__lock:
            self._require(session_id).add_reset(change)

    def delivered(self, session_id: str) -> None:
        """Say that the client has taken one chunk."""
        with self.__lock:
            session = self._find(session_id)
            if session is not None:
                session.delivered(time.monotonic())
                self.__lock.notify()

    def check_admits(self) -> None:
        """Raise what a session of whatever size would be refused by now.

        Raises:
            ServerFullError: if the line is full.
            ServerDrainingError: if no new sessions are taken.
            OmniError: the failure, if the engine has ended.
        """
        with self.__lock:
            self._check_admits()
            self._line.check_open()

    def close_admission(self) -> None:
        """Refuse new sessions; those with a place and those in line go on."""
        with self.__lock:
            self.admits = False

    def drain(self) -> None:
        """Refuse new sessions and end all others with an error, at their chunk boundaries."""
        with self.__lock:
            self.admits, self.draining = False, True
            for session in self._line:
                self._end(session, EndReason.FAILED, ServerDrainingError())
            self.__lock.notify()

    # ------------------------------------------------------------ for the thread with the workers

    @property
    def is_over(self) -> bool:
        """Whether no task will come any more."""
        with self.__lock:
            ending = self.draining or self.failure is not None
            return ending and not (self._places or self._line)

    @property
    def has_group(self) -> bool:
        """Whether there are workers to place sessions on."""
        return self._places.capacity is not None

    def adopt(self, group: GroupCapacity) -> None:
        """Give out the places of a new worker group, and end who can never have one of them."""
        with self.__lock:
            self._places.offer(group)
            self.quarantined = group.quarantined
            self.metrics.group_ready(group)
            for session in self._line:
                try:
                    self._places.check_fits(session.request.geometry)
                except OutOfKVMemoryError as error:
                    self._end(session, EndReason.FAILED, error)
            self._line_changed()

    def lose_group(self, error: WorkerFailedError) -> None:
        """End the sessions that the lost workers held; the others wait for the next group."""
        with self.__lock:
            self._places.offer(None)
            for session in self._places:
                restarted = WorkerRestartedError(f"the workers were restarted: {error}")
                self._end(session, *(self._due_end(session) or (EndReason.FAILED, restarted)))

    def fail(self, error: OmniError) -> None:
        """End the engine permanently, and all sessions."""
        with self.__lock:
            # Copies: sessions must not share (and extend) one traceback.
            self.failure = copy.copy(error)
            self._places.offer(None)
            for session in (*self._places, *self._line):
                self._end(session, EndReason.FAILED, copy.copy(error))

    def next_task(self) -> Task | None:
        """Say what the workers do next; ``None`` after a sleep that a call or a due time ends."""
        with self.__lock:
            now_s = time.monotonic()
            task = self._choose(now_s)
            if task is None and not self.draining:
                wake_at_s = self._places.wake_at_s()
                idle_s = IDLE_CHECK_S if wake_at_s is None else wake_at_s - now_s
                self.__lock.wait(min(max(idle_s, 0.0), IDLE_CHECK_S))
            return task

    def chunk_made(self, task: ChunkTask, result: ChunkResult) -> None:
        """Hand a chunk to its client."""
        session = task.session
        with self.__lock:
            self.metrics.chunk_ready(session, result.ready_s)
            session.chunk_made(result.ready_s)
            session.emit(ChunkReady(result, task.receipt, last=session.finished))

    def restarted(self, task: RestartTask) -> None:
        """Begin again with chunk 0 of a session, which the workers have opened anew."""
        with self.__lock:
            task.session.restart(task.request, time.monotonic())
            task.session.emit(WasReset())

    def task_done(self, session: EngineSession, error: OmniError | None = None) -> None:
        """Take a session back from the workers.

        Args:
            error: what the task raised; the session ends by it. One for which the workers had no
                room after all waits again instead, as long as others may make room.
        """
        with self.__lock:
            if session.status is SessionStatus.OPENING:
                if error is None:
                    now_s = time.monotonic()
                    self.metrics.opened(session, now_s)
                    session.emit(Opened(now_s))
                elif isinstance(error, OutOfKVMemoryError) and len(self._places) > 1:
                    self._put_off(session)
                    return
            session.error = error
            session.move_to(SessionStatus.OPEN)

    def tell_end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None, peak_bytes: int
    ) -> None:
        """Count and log the end of a session that was taken out, and tell its client."""
        self.metrics.ended(session, reason, error, peak_bytes)
        session.emit(Ended(reason, error, peak_bytes))

    # ------------------------------------------------------------ decisions

    def _choose(self, now_s: float) -> Task | None:
        for session in self._places:
            if (end := self._due_end(session)) is not None:
                self._take_out(session)
                return EndTask(session, *end)
        if self._line.num_placeable:
            session = self._line.take_head()
            self._places.take(session)
            session.move_to(SessionStatus.OPENING)
            self._line_changed()
            return OpenTask(session)
        session = self._places.pick(now_s)
        if session is None:
            return None
        session.move_to(SessionStatus.RUNNING)
        if session.resets:
            return RestartTask(session, session.request_after_resets())
        return ChunkTask(session, *session.plan_chunk(now_s))

    def _due_end(self, session: EngineSession) -> tuple[EndReason, OmniError | None] | None:
        """Return why the session ends at this chunk boundary, ``None`` if it goes on."""
        drained = (EndReason.FAILED, ServerDrainingError()) if self.draining else None
        return session.due_end or drained

    # ------------------------------------------------------------ line and places

    def _find(self, session_id: str) -> EngineSession | None:
        return self._line.find(session_id) or self._places.find(session_id)

    def _require(self, session_id: str) -> EngineSession:
        session = self._find(session_id)
        if session is None:
            raise SessionClosedError(f"there is no session {session_id}")
        return session

    def _check_admits(self) -> None:
        if self.failure is not None:
            raise copy.copy(self.failure)
        if not self.admits:
            raise ServerDrainingError

    def _line_changed(self) -> None:
        """Tell every session that has to wait its place in line, and update the figures."""
        self._line.tell_positions()
        self.metrics.line_changed(
            placed=len(self._places), waiting=len(self._line), held_bytes=self._places.held_bytes
        )

    def _put_off(self, session: EngineSession) -> None:
        """Put a session that the workers had no room for back to the head of the line."""
        self._places.put_off(session)
        session.move_to(SessionStatus.WAITING)
        self._line.go_first(session)
        self._line_changed()
        if (end := self._due_end(session)) is not None:
            self._end(session, *end)

    def _end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None = None
    ) -> None:
        """End a session of which the workers hold nothing."""
        self._take_out(session)
        self.tell_end(session, reason, error, peak_bytes=0)

    def _take_out(self, session: EngineSession) -> None:
        if not self._line.leave(session):
            self._places.give_up(session)
        session.move_to(SessionStatus.CLOSED)
        self._line_changed()
