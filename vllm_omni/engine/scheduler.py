"""Who waits, who has a place on the workers, and what the workers do next."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable
from itertools import chain

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkResult, GroupCapacity, SessionRequest
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.roster import Demand, ReplicaStatus, Roster
from vllm_omni.engine.session import (
    ChunkReady,
    ChunkTask,
    EndReason,
    EngineSession,
    Opened,
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
    WorkerFailedError,
    WorkerRestartedError,
)

IDLE_CHECK_S = 1.0
"""Longest sleep of the thread that commands the workers: one may die while nobody needs it."""


class Scheduler:
    """The monitor over all sessions: one lock, which only this class can take.

    Places are given first come, first served, over all replicas. The order is strict: a small
    session never overtakes a large one, or the large one could wait for ever. Each replica makes
    chunks for the session whose viewer needs one first.

    Clients call the first part of the methods, from any thread; none of them waits for workers. The
    second part is for the threads that command the workers, one for each replica: such a thread
    asks for a task, carries it out and says how it went.

    Args:
        max_queued: sessions that may wait for a place.
    """

    def __init__(self, metrics: EngineMetrics, *, max_queued: int) -> None:
        self.metrics = metrics
        # Two underscores: not even a subclass can take it.
        self.__lock = threading.Condition()
        self._roster = Roster(metrics, max_queued=max_queued)

    # ------------------------------------------------------------ state

    @property
    def admits(self) -> bool:
        """Whether new sessions are taken; without that, those that are here go on."""
        return self._roster.admits

    @property
    def draining(self) -> bool:
        """Whether every session is to end."""
        return self._roster.draining

    @property
    def failure(self) -> OmniError | None:
        """The error that ended the engine permanently, or ``None``."""
        return self._roster.failure

    @property
    def quarantined(self) -> int:
        """Number of failures whose memory the workers keep until their process ends."""
        return sum(places.quarantined for places in self._roster.fleet)

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
        if self._roster.fleet.serves:
            return None
        return "restarting" if self.max_sessions else "loading"

    @property
    def num_sessions(self) -> int:
        """Number of sessions on the workers and in line."""
        with self.__lock:
            return len(self._roster)

    @property
    def num_waiting(self) -> int:
        """Number of sessions in line."""
        with self.__lock:
            return len(self._roster.line)

    @property
    def max_sessions(self) -> int:
        """Number of sessions that the workers hold at once, or that lost ones did."""
        return self._roster.fleet.max_sessions

    def is_waiting(self, session_id: str) -> bool:
        """Whether a session has no place on the workers yet."""
        with self.__lock:
            session = self._roster.find(session_id)
            return session is not None and session.is_waiting

    def check_fits(self, size: VideoGeometry) -> None:
        """Raise OutOfKVMemoryError for a size that the workers, where known, can never hold."""
        with self.__lock:
            self._roster.fleet.check_fits(size)

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
            self._roster.check_admits()
            self._roster.fleet.check_fits(request.geometry)
            self._roster.line.join(session)
            self._roster.line_changed()
            self.__lock.notify_all()
        return session.session_id

    def submit(self, session_id: str, event: ControlEvent) -> None:
        """Queue a client event for the next chunk boundary of a session.

        Raises:
            SessionClosedError: if there is no such session; none is created.
            EventConflictError: if the event's id was used before.
            InteractionError: if the session cannot apply the event.
        """
        with self.__lock:
            self._roster.require(session_id).interactions.submit(event, time.monotonic())

    def stop(self, session_id: str, cause: StopCause = StopCause.DISCONNECTED) -> None:
        """End a session at its next chunk boundary; one that has ended is no error.

        Args:
            cause: what the session is counted as; of several, the first. By default whoever
                wanted it has left.
        """
        with self.__lock:
            session = self._roster.find(session_id)
            if session is None or session.stop_cause is not None:
                return
            session.stop_cause = cause
            self.metrics.stopped(cause)
            if session.status is SessionStatus.WAITING:
                self._roster.end(session, EndReason.STOPPED)
            self.__lock.notify_all()

    def reset(self, session_id: str, change: Callable[[SessionRequest], SessionRequest]) -> None:
        """Restart a session from chunk 0 at its next chunk boundary.

        Args:
            change: makes the new request of the one with the current prompt.

        Raises:
            SessionClosedError: if there is no such session.
            InvalidRequestError: if too many resets wait already.
        """
        with self.__lock:
            self._roster.require(session_id).add_reset(change)

    def delivered(self, session_id: str) -> None:
        """Say that the client has taken one chunk."""
        with self.__lock:
            session = self._roster.find(session_id)
            if session is not None:
                session.delivered(time.monotonic())
                self.__lock.notify_all()

    def check_admits(self) -> None:
        """Raise what a session of whatever size would be refused by now.

        Raises:
            ServerFullError: if the line is full.
            ServerDrainingError: if no new sessions are taken.
            OmniError: the failure, if the engine has ended.
        """
        with self.__lock:
            self._roster.check_admits()
            self._roster.line.check_open()

    def close_admission(self) -> None:
        """Refuse new sessions; those with a place and those in line go on."""
        with self.__lock:
            self._roster.admits = False

    def drain(self) -> None:
        """Refuse new sessions and end all others with an error, at their chunk boundaries."""
        with self.__lock:
            self._roster.admits, self._roster.draining = False, True
            self._roster.fail(self._roster.line, ServerDrainingError())
            self.__lock.notify_all()

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Say what is known of each replica, by its number."""
        with self.__lock:
            return self._roster.status()

    # ------------------------------------------------------------ for the threads with the workers

    def has_workers(self, replica: int = 0) -> bool:
        """Whether the workers of a replica are up."""
        return self._roster.fleet[replica].capacity is not None

    def is_over(self, replica: int = 0) -> bool:
        """Whether no task will come any more for the workers of a replica."""
        with self.__lock:
            places = self._roster.fleet[replica]
            if self.draining or self.failure is not None:
                return not (places or self._roster.line)
            return places.failure is not None or not (places or places.admits)

    def adopt(self, group: GroupCapacity, replica: int = 0) -> None:
        """Give out the places of a new worker group, and end who can never have a place."""
        with self.__lock:
            self._roster.fleet[replica].offer(group)
            self.metrics.group_ready(replica, group)
            self._roster.replicas_changed()
            self.__lock.notify_all()

    def lose_group(self, error: WorkerFailedError, replica: int = 0) -> None:
        """End the sessions that the lost workers held; the line waits for other workers."""
        with self.__lock:
            places = self._roster.fleet[replica]
            places.offer(None)
            for session in places:
                restarted = WorkerRestartedError(f"the workers were restarted: {error}")
                due = self._roster.due_end(session)
                self._roster.end(session, *(due or (EndReason.FAILED, restarted)))

    def lose_replica(self, error: OmniError, replica: int) -> None:
        """End a replica permanently with its sessions, and the engine with the last replica."""
        with self.__lock:
            places = self._roster.fleet[replica]
            places.failure, places.admits = copy.copy(error), False
            places.offer(None)
            self.metrics.group_lost(replica, for_good=True)
            if self._roster.fleet.is_lost:
                self._fail(error)
            else:
                self._roster.fail(places, error)
                self._roster.replicas_changed()
            self.__lock.notify_all()

    def next_task(self, replica: int = 0) -> Task | None:
        """Say what a replica does next; ``None`` after a sleep that a call or a due time ends."""
        with self.__lock:
            now_s = time.monotonic()
            places = self._roster.fleet[replica]
            places.asked_s = now_s
            task = self._roster.choose(replica, now_s)
            if task is None and not self.draining:
                wake_at_s = places.wake_at_s()
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
            fleet = self._roster.fleet
            if session.status is SessionStatus.OPENING:
                if error is None:
                    now_s = time.monotonic()
                    self.metrics.opened(session, now_s)
                    session.emit(Opened(now_s))
                elif isinstance(error, OutOfKVMemoryError) and len(fleet[session.replica]) > 1:
                    self._roster.put_off(session)
                    return
            session.error = error
            session.move_to(SessionStatus.OPEN)

    def tell_end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None, peak_bytes: int
    ) -> None:
        """Count and log the end of a session that was taken out, and tell its client."""
        self._roster.tell_end(session, reason, error, peak_bytes)

    # ------------------------------------------------------------ for who adds and removes replicas

    def add_replica(self, replica: int) -> None:
        """Make room for another replica, whose workers are to come."""
        with self.__lock:
            self._roster.fleet.add(replica)
            self.metrics.replica_added(replica)

    def retire_replica(self, replica: int) -> None:
        """Give a replica no new session; its sessions go on, and it ends with the last of them.

        Raises:
            InvalidRequestError: if there is no such replica, or no other one that serves.
        """
        with self.__lock:
            self._roster.retire(replica)
            self._roster.replicas_changed()
            self.__lock.notify_all()

    def remove_replica(self, replica: int) -> None:
        """Forget a replica whose workers have ended, and end who could have a place only there."""
        with self.__lock:
            self._roster.fleet.remove(replica)
            self.metrics.replica_removed(replica)
            self._roster.replicas_changed()
            self.__lock.notify_all()

    def end_if_lost(self) -> None:
        """End who waits for a replica if none is left, and the engine with the last session.

        For who knows that no other replica can be started.
        """
        with self.__lock:
            fleet = self._roster.fleet
            if any(places.admits for places in fleet):
                return
            # The last that took sessions was lost: none is retired unless another one serves.
            error = next(places.failure for places in fleet if places.failure is not None)
            if fleet.is_lost:
                self._fail(error)
            else:
                self._roster.fail(self._roster.line, error)
            self.__lock.notify_all()

    def demand(self) -> Demand:
        """Say how many sessions wait and what room there is."""
        with self.__lock:
            return self._roster.demand(time.monotonic())

    def _fail(self, error: OmniError) -> None:
        self._roster.failure = copy.copy(error)
        for places in self._roster.fleet:
            places.offer(None)
        self._roster.fail((*chain(*self._roster.fleet), *self._roster.line), error)
