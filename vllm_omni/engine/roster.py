"""The sessions of an engine, and the one way out for each of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable

from vllm_omni.diffusion.messages import WorkerReady
from vllm_omni.engine.journal import Journal
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import Ended, EndReason, EngineSession, SessionStatus
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import OmniError, SessionClosedError


class Roster:
    """Used by the engine's thread and by the client's side. All changes of who is where are here.

    Attributes:
        lock: guards the scheduler and what the client's side changes of a session; the engine's
            thread sleeps on it.
        scheduler: to be asked; changed here alone.
        draining: whether every session is to end.
        failure: what the engine was lost by, for good.
    """

    def __init__(self, supervisor: WorkerSupervisor, journal: Journal, *, max_queued: int) -> None:
        self.lock = threading.Condition()
        self.scheduler = Scheduler(max_queued=max_queued)
        self.draining = False
        self.failure: OmniError | None = None
        self._supervisor = supervisor
        self._journal = journal

    def session(self, session_id: str) -> EngineSession:
        """A session; the caller holds the lock.

        Raises:
            SessionClosedError: if there is none.
        """
        session = self.scheduler.find(session_id)
        if session is None:
            raise SessionClosedError(f"there is no session {session_id}")
        return session

    def add(self, session: EngineSession) -> None:
        """Put a session in line; the caller holds the lock.

        Raises:
            OmniError: why it cannot come.
        """
        if self.failure is not None:
            raise _again(self.failure)
        if self.draining:
            raise _shutting_down()
        self.scheduler.check_fits(session.request)
        self.scheduler.enqueue(session)
        self._line_changed()

    def adopt(self, group: WorkerReady) -> None:
        """Give out the places of a new group, and end who can never have one of them."""
        with self.lock:
            self.scheduler.adopt(group)
            misfits = self.scheduler.misfits()
            self._line_changed()
        for session, error in misfits:
            self.end(session, EndReason.FAILED, error)

    def lose_group(self) -> None:
        """Place nobody until another group is adopted; nothing is freed on the lost one."""
        with self.lock:
            self.scheduler.lose_group()

    def place(self, session: EngineSession) -> None:
        """The workers have opened the session at the head of the line."""
        with self.lock:
            self.scheduler.place(session)
            session.move_to(SessionStatus.OPEN)
            self._line_changed()

    def put_off(self, session: EngineSession) -> None:
        """The workers had no room for the session at the head of the line after all."""
        with self.lock:
            self.scheduler.refused(session)
            self._line_changed()

    def drain(self) -> None:
        """Take nobody any more and have all end; the caller holds the lock."""
        self.draining = True

    def _line_changed(self) -> None:
        """Tell those who wait, and count; the caller holds the lock."""
        self.scheduler.announce_positions()
        self._journal.line_changed(self.scheduler)

    def end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None = None
    ) -> None:
        """Free, forget, count, tell."""
        with self.lock:
            if not self.scheduler.remove(session):
                return  # Two threads wanted to.
            is_held = session.status is not SessionStatus.WAITING and self.scheduler.has_group
            session.move_to(SessionStatus.CLOSED)
            self._line_changed()
        peak_bytes = 0
        try:
            if is_held:
                executor = self._supervisor.executor
                executor.close_session(session.session_id)
                peak_bytes = executor.peak_bytes() if reason is EndReason.FINISHED else 0
        finally:
            self._journal.ended(session, reason, error, peak_bytes=peak_bytes)
            session.emit(Ended(reason, error, peak_bytes))

    def end_due(self, sessions: Iterable[EngineSession]) -> None:
        """End those that were stopped, or all when draining."""
        for session in sessions:
            if session.stop_cause is not None:
                self.end(session, EndReason.STOPPED)
            elif self.draining:
                self.end(session, EndReason.FAILED, _shutting_down())

    def end_without_loop(self) -> None:
        """End who is due while a group starts, which may take minutes: nobody holds a place."""
        with self.lock:
            waiting = () if self.scheduler.has_group else self.scheduler.waiting
        self.end_due(waiting)

    def fail(self, error: OmniError) -> None:
        """End everything for good."""
        with self.lock:
            self.failure = _again(error)
            self.scheduler.lose_group()
            sessions = self.scheduler.sessions
        for session in sessions:
            self.end(session, EndReason.FAILED, _again(error))


def _again(error: OmniError) -> OmniError:
    """The same error for somebody else: an error keeps all frames that it was raised through."""
    return copy.copy(error)


def _shutting_down() -> SessionClosedError:
    return SessionClosedError("the server is shutting down")
