"""All sessions of an engine, and what is decided about them; without locks and threads."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.places import Fleet
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
    Waiting,
)
from vllm_omni.errors import (
    InvalidRequestError,
    OmniError,
    OutOfKVMemoryError,
    ServerDrainingError,
    ServerFullError,
    SessionClosedError,
)


class Line:
    """Sessions without a place, first come, first served. Used by the scheduler alone.

    Args:
        fleet: the places that they wait for.
        max_queued: how many of them may have to wait.
    """

    def __init__(self, fleet: Fleet, *, max_queued: int) -> None:
        self._fleet = fleet
        self._max_queued = max_queued
        self._sessions: OrderedDict[str, EngineSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[EngineSession]:
        """Go through the sessions as they are now, the head of the line first."""
        return iter(tuple(self._sessions.values()))

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id if it stands in line."""
        return self._sessions.get(session_id)

    def check_open(self) -> None:
        """Refuse what a newcomer of whatever size would be refused by.

        Raises:
            ServerFullError: if nobody more may wait and no place is left.
        """
        num_waiting = len(self) - self._fleet.num_placeable(self)
        if num_waiting >= self._max_queued and (num_waiting or self._fleet.num_free <= len(self)):
            raise self._is_full(num_waiting)

    def join(self, session: EngineSession) -> None:
        """Put a session at the end of the line.

        Raises:
            ServerFullError: if nobody more may wait; the session is not in line then.
        """
        self._sessions[session.session_id] = session
        num_waiting = len(self) - self._fleet.num_placeable(self)
        if num_waiting > self._max_queued:
            self.leave(session)
            raise self._is_full(num_waiting - 1)

    def go_first(self, session: EngineSession) -> None:
        """Put a session at the head of the line, however long the line is."""
        self._sessions[session.session_id] = session
        self._sessions.move_to_end(session.session_id, last=False)

    def leave(self, session: EngineSession) -> bool:
        """Remove a session from the line and return whether it stood there."""
        return self._sessions.pop(session.session_id, None) is not None

    def tell_positions(self) -> None:
        """Tell its position to every session that has to wait; 1 is next."""
        waiting = [*self][self._fleet.num_placeable(self) :]
        for position, session in enumerate(waiting, start=1):
            session.emit(Waiting(position))

    def _is_full(self, num_waiting: int) -> ServerFullError:
        return ServerFullError(
            f"{self._fleet.num_sessions} of {self._fleet.max_sessions} sessions run and "
            f"{num_waiting} of {self._max_queued} wait; try again later (max_num_seqs, max_queued)"
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
        """Return the session of this id; raises SessionClosedError if there is none."""
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
        plan = session.interactions.plan(session.session_id, session.chunks_made, now_s)
        return ChunkTask(session, *plan)

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
        waiting, placeable = len(self.line), self.fleet.num_placeable(self.line)
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
