"""All sessions of an engine, and what is decided about them; without locks and threads."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_omni.engine.fleet import Fleet
from vllm_omni.engine.line import Line
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import (
    ChunkTask,
    Ended,
    EndReason,
    EndTask,
    EngineSession,
    OpenTask,
    RestartTask,
    SessionStatus,
    Task,
)
from vllm_omni.errors import (
    InvalidRequestError,
    OmniError,
    OutOfKVMemoryError,
    ServerDrainingError,
    SessionClosedError,
)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What is known of one replica.

    Attributes:
        state: ``loading``, ``ready``, ``restarting``, ``draining`` or ``failed``.
        sessions: sessions that hold a place on it.
        max_sessions: its places, 0 until its workers are up.
        failure: what it was lost by, where it was.
    """

    number: int
    state: str
    sessions: int
    max_sessions: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Demand:
    """How many sessions wait, and what room there is or will be for them.

    Attributes:
        waiting: sessions in line.
        free: places that nobody holds; of them only those for the head of the line, where not
            everybody in line fits into what is left of the KV pools.
        alive: replicas that take sessions, or will when their workers are up.
        coming: those of them whose workers are not up.
        places_each: places of a replica, 1 until that is known.
        idle: number of each replica without sessions -> its places, and for how many seconds.
    """

    waiting: int
    free: int
    alive: int
    coming: int
    places_each: int
    idle: Mapping[int, tuple[int, float]]


class Roster:
    """Who waits, who has a place on which replica, and what each replica does next.

    The scheduler alone uses it, under its lock.

    Attributes:
        fleet: the places of all replicas.
        line: the sessions that wait for a place.
        admits: whether new sessions are taken.
        draining: whether every session is to end.
        failure: the error that ended the engine permanently, or ``None``.
    """

    def __init__(self, metrics: EngineMetrics, *, max_queued: int) -> None:
        self.fleet = Fleet()
        self.line = Line(self.fleet, max_queued=max_queued)
        self.admits = True
        self.draining = False
        self.failure: OmniError | None = None
        self._metrics = metrics

    def __len__(self) -> int:
        return self.fleet.num_sessions + len(self.line)

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id, wherever it is."""
        return self.line.find(session_id) or self.fleet.find(session_id)

    def require(self, session_id: str) -> EngineSession:
        """Return the session of this id.

        Raises:
            SessionClosedError: if there is none.
        """
        session = self.find(session_id)
        if session is None:
            raise SessionClosedError(f"there is no session {session_id}")
        return session

    def check_admits(self) -> None:
        """Raise what every new session is refused by, if it is: the failure, or the drain."""
        if self.failure is not None:
            raise copy.copy(self.failure)
        if not self.admits:
            raise ServerDrainingError

    def choose(self, replica: int, now_s: float) -> Task | None:
        """Return what the workers of a replica do next, ``None`` for nothing now."""
        places = self.fleet[replica]
        for session in places:
            if (end := self.due_end(session)) is not None:
                self.take_out(session)
                return EndTask(session, *end)
        head = next(iter(self.line), None)
        if head is not None and self.fleet.takes(replica, head, now_s):
            self.line.leave(head)
            places.take(head)
            head.move_to(SessionStatus.OPENING)
            self.line_changed()
            return OpenTask(head)
        session = places.pick(now_s)
        if session is None:
            return None
        session.move_to(SessionStatus.RUNNING)
        if session.resets:
            return RestartTask(session, session.request_after_resets())
        return ChunkTask(session, *session.plan_chunk(now_s))

    def due_end(self, session: EngineSession) -> tuple[EndReason, OmniError | None] | None:
        """Return why the session ends at this chunk boundary, ``None`` if it goes on."""
        drained = (EndReason.FAILED, ServerDrainingError()) if self.draining else None
        return session.due_end or drained

    def line_changed(self) -> None:
        """Tell every session that has to wait its place in line, and update the figures."""
        self.line.tell_positions()
        self._metrics.line_changed(len(self.line))
        for places in self.fleet:
            self._metrics.places_changed(
                places.replica, placed=len(places), held_bytes=places.held_bytes
            )

    def has_neighbours(self, session: EngineSession) -> bool:
        """Whether other sessions hold places on the same replica."""
        return len(self.fleet[session.replica]) > 1

    def put_off(self, session: EngineSession) -> None:
        """Put a session that the workers had no room for back to the head of the line."""
        self.fleet[session.replica].put_off(session)
        session.move_to(SessionStatus.WAITING)
        self.line.go_first(session)
        self.line_changed()
        if (end := self.due_end(session)) is not None:
            self.end(session, *end)

    def replicas_changed(self) -> None:
        """End the sessions in line whose window can never fit, and tell the others."""
        for session in self.line:
            try:
                self.fleet.check_fits(session.request.geometry)
            except OutOfKVMemoryError as error:
                self.end(session, EndReason.FAILED, error)
        self.line_changed()

    def fail(self, sessions: Iterable[EngineSession], error: OmniError) -> None:
        """End sessions by an error; each gets a copy, or all would extend one traceback."""
        for session in sessions:
            self.end(session, EndReason.FAILED, copy.copy(error))

    def end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None = None
    ) -> None:
        """End a session of which the workers hold nothing."""
        self.take_out(session)
        self.tell_end(session, reason, error, peak_bytes=0)

    def take_out(self, session: EngineSession) -> None:
        """Take a session out of the line or of its place, for good."""
        if not self.line.leave(session):
            self.fleet[session.replica].give_up(session)
        session.move_to(SessionStatus.CLOSED)
        self.line_changed()

    def tell_end(
        self, session: EngineSession, reason: EndReason, error: OmniError | None, peak_bytes: int
    ) -> None:
        """Count and log the end of a session that was taken out, and tell its client."""
        self._metrics.ended(session, reason, error, peak_bytes)
        session.emit(Ended(reason, error, peak_bytes))

    def retire(self, replica: int) -> None:
        """Give a replica no new session.

        Raises:
            InvalidRequestError: if there is no such replica, or no other one that serves.
        """
        if replica not in self.fleet:
            raise InvalidRequestError(f"there is no replica {replica}", field="replica")
        if not any(one.serves for one in self.fleet if one.replica != replica):
            raise InvalidRequestError(
                f"replica {replica} is the only one that serves; end the server instead, with "
                "--drain-timeout if its worlds are to go on",
                field="replica",
            )
        self.fleet[replica].admits = False

    def demand(self, now_s: float) -> Demand:
        """Return how many sessions wait and what room there is for them."""
        alive = [places for places in self.fleet if places.admits]
        waiting, placeable = len(self.line), self.line.num_placeable
        return Demand(
            waiting=waiting,
            free=self.fleet.num_free if placeable == waiting else placeable,
            alive=len(alive),
            coming=sum(places.capacity is None for places in alive),
            places_each=max([1, *(places.max_sessions for places in self.fleet)]),
            idle={
                places.replica: (places.max_sessions, now_s - places.empty_since_s)
                for places in alive
                if places.capacity is not None and not places
            },
        )

    def status(self) -> tuple[ReplicaStatus, ...]:
        """What is known of each replica, by its number."""
        return tuple(
            ReplicaStatus(
                places.replica,
                places.state,
                len(places),
                places.max_sessions,
                None if places.failure is None else str(places.failure),
            )
            for places in self.fleet
        )
