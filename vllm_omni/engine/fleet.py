"""The places of all replicas, and which replica takes the next session."""

from collections.abc import Iterable, Iterator

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.engine.places import Places, num_placeable
from vllm_omni.engine.session import EngineSession
from vllm_omni.errors import OutOfKVMemoryError

AT_HAND_S = 2.0
"""A replica that has not asked for longer is busy or hangs; others do not wait for it."""


class Fleet:
    """Places by the number of their replica; replica 0 is there from the start.

    A session stays on the replica where it got its place. Used by the scheduler alone.
    """

    def __init__(self) -> None:
        self._replicas = {0: Places(0)}

    def __getitem__(self, replica: int) -> Places:
        return self._replicas[replica]

    def __contains__(self, replica: int) -> bool:
        return replica in self._replicas

    def __iter__(self) -> Iterator[Places]:
        """Go through the replicas as they are now."""
        return iter(tuple(self._replicas.values()))

    @property
    def sessions(self) -> tuple[EngineSession, ...]:
        """All sessions that hold a place."""
        return tuple(session for places in self for session in places)

    @property
    def num_sessions(self) -> int:
        """The number of sessions that hold a place."""
        return sum(len(places) for places in self)

    @property
    def max_sessions(self) -> int:
        """The number of places on replicas that take sessions, or did before they were lost."""
        return sum(places.max_sessions for places in self if places.admits)

    @property
    def num_free(self) -> int:
        """The number of places that a session could get now."""
        return sum(places.num_free for places in self if places.admits)

    @property
    def serves(self) -> bool:
        """Whether one replica at least has workers and takes sessions."""
        return any(places.serves for places in self)

    @property
    def is_lost(self) -> bool:
        """Whether every replica has ended permanently."""
        return all(places.failure is not None for places in self)

    def add(self, replica: int) -> None:
        """Make room for another replica, whose workers are not up."""
        self._replicas[replica] = Places(replica)

    def remove(self, replica: int) -> None:
        """Forget a replica that holds no session."""
        del self._replicas[replica]

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id if it holds a place."""
        found = (places.find(session_id) for places in self)
        return next((session for session in found if session is not None), None)

    def check_fits(self, size: VideoGeometry) -> None:
        """Refuse what no replica that takes sessions could hold, as far as workers are known.

        Raises:
            OutOfKVMemoryError: if the pool of each is too small.
        """
        known = [places for places in self if places.capacity is not None and places.admits]
        refusal: OutOfKVMemoryError | None = None
        for places in known:
            try:
                places.check_fits(size)
            except OutOfKVMemoryError as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def num_placeable(self, line: Iterable[EngineSession]) -> int:
        """Return how many sessions at the head of a line can get a place now."""
        return num_placeable(line, [places.room() for places in self])

    def takes(self, replica: int, session: EngineSession, now_s: float) -> bool:
        """Return whether this replica, which asks now, is the one for the next session in line.

        It is the one with the most free places among those that have room and are at hand.
        """
        free = {
            places.replica: places.num_free
            for places in self
            if (room := places.room()) is not None
            and room.fits(session)
            and (places.replica == replica or now_s - places.asked_s < AT_HAND_S)
        }
        return replica in free and replica == max(free, key=lambda number: (free[number], -number))
