"""The line of sessions that wait for a place."""

from collections import OrderedDict
from collections.abc import Iterator

from vllm_omni.engine.fleet import Fleet
from vllm_omni.engine.session import EngineSession, Waiting
from vllm_omni.errors import ServerFullError


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

    @property
    def num_placeable(self) -> int:
        """The number of sessions at the head of the line that can get a place now."""
        return self._fleet.num_placeable(self)

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id if it stands in line."""
        return self._sessions.get(session_id)

    def check_open(self) -> None:
        """Refuse what a newcomer of whatever size would be refused by.

        Raises:
            ServerFullError: if nobody more may wait and no place is left.
        """
        num_waiting = len(self) - self.num_placeable
        if num_waiting >= self._max_queued and (num_waiting or self._fleet.num_free <= len(self)):
            raise self._is_full(num_waiting)

    def join(self, session: EngineSession) -> None:
        """Put a session at the end of the line.

        Raises:
            ServerFullError: if nobody more may wait; the session is not in line then.
        """
        self._sessions[session.session_id] = session
        num_waiting = len(self) - self.num_placeable
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
        for position, session in enumerate([*self][self.num_placeable :], start=1):
            session.emit(Waiting(position))

    def _is_full(self, num_waiting: int) -> ServerFullError:
        return ServerFullError(
            f"{self._fleet.num_sessions} of {self._fleet.max_sessions} sessions run and "
            f"{num_waiting} of {self._max_queued} wait; try again later (max_num_seqs, max_queued)"
        )
