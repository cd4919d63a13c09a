"""Who waits, who has a place on the workers, whose chunk is next. No clocks, no I/O of its own."""

from collections import OrderedDict

from vllm_omni.engine.session import EngineSession, Waiting
from vllm_omni.errors import ServerFullError


class Scheduler:
    """First come, first served for places; earliest playback deadline first for chunks.

    Args:
        max_sessions: places on the workers.
        max_queued: sessions that may wait.
    """

    def __init__(self, *, max_sessions: int, max_queued: int) -> None:
        self.max_sessions = max_sessions
        self.max_queued = max_queued
        self._waiting: OrderedDict[str, EngineSession] = OrderedDict()
        self._placed: OrderedDict[str, EngineSession] = OrderedDict()

    @property
    def waiting(self) -> tuple[EngineSession, ...]:
        """Sessions in line, first come first."""
        return tuple(self._waiting.values())

    @property
    def placed(self) -> tuple[EngineSession, ...]:
        """Sessions that hold a place."""
        return tuple(self._placed.values())

    @property
    def sessions(self) -> tuple[EngineSession, ...]:
        """All sessions."""
        return self.placed + self.waiting

    def enqueue(self, session: EngineSession) -> None:
        """Put a session at the end of the line.

        Raises:
            ServerFullError: if the line is full.
        """
        free_places = max(self.max_sessions - len(self._placed) - len(self._waiting), 0)
        if not free_places and len(self._waiting) >= self.max_queued:
            raise ServerFullError(
                f"{len(self._placed)} of {self.max_sessions} sessions run and "
                f"{len(self._waiting)} of {self.max_queued} wait; try again later (max_num_seqs, "
                "max_queued)"
            )
        self._waiting[session.session_id] = session

    def next_to_place(self) -> EngineSession | None:
        """The head of the line, if a place is free."""
        if not self._waiting or len(self._placed) >= self.max_sessions:
            return None
        return next(iter(self._waiting.values()))

    def place(self, session: EngineSession) -> None:
        """Move a session from the line to a place."""
        del self._waiting[session.session_id]
        self._placed[session.session_id] = session

    def remove(self, session: EngineSession) -> None:
        """Forget a session wherever it stands."""
        self._waiting.pop(session.session_id, None)
        self._placed.pop(session.session_id, None)

    def announce_positions(self) -> None:
        """Tell its place in the line to every session for which no place is free."""
        free_places = max(self.max_sessions - len(self._placed), 0)
        for position, session in enumerate(self.waiting[free_places:], start=1):
            session.emit(Waiting(position))

    def pick(self, now_s: float) -> EngineSession | None:
        """The session whose viewer needs a chunk first, among those that may run now."""
        ready = [
            session
            for session in self._placed.values()
            if (start := session.runnable_at_s()) is not None and start <= now_s
        ]
        return min(ready, key=lambda session: session.deadline_s, default=None)

    def wake_at_s(self) -> float | None:
        """When the next session may run, if nothing else happens before."""
        starts = (session.runnable_at_s() for session in self._placed.values())
        return min((start for start in starts if start is not None), default=None)
