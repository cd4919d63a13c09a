"""The places that worker groups have for sessions, in numbers and in pages of their KV pools."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import GroupCapacity, SessionRequest
from vllm_omni.engine.session import EngineSession
from vllm_omni.errors import OmniError, OutOfKVMemoryError

AT_HAND_S = 2.0
"""A replica that has not asked for longer is busy or hangs; others do not wait for it."""


@dataclass(slots=True)
class Room:
    """What a worker group has left for new sessions; :meth:`take` counts a session in."""

    group: GroupCapacity
    places: int
    held_pages: int
    without_room: EngineSession | None

    def fits(self, session: EngineSession) -> bool:
        """Whether a session could get a place."""
        pages = self.held_pages + _pages(self.group, session.request)
        fits = self.places > 0 and pages <= self.group.num_pages
        return fits and session is not self.without_room

    def take(self, session: EngineSession) -> None:
        """Count a session that gets a place here."""
        self.places -= 1
        self.held_pages += _pages(self.group, session.request)


class Places:
    """One worker group's capacity and the sessions that hold it. Used by the scheduler alone.

    Args:
        replica: number of the replica whose workers they are on.

    Attributes:
        admits: whether new sessions may get a place.
        asked_s: when the workers last asked for something to do, by ``time.monotonic()``.
        failure: the error that ended the replica permanently, or ``None``.
        quarantined: failures whose memory the workers keep until their process ends.
        empty_since_s: when the latest session gave up its place, or the group came up.
        capacity: of the group that runs; ``None`` while there is none.
        max_sessions: number of places of this group, or of the one that was lost.
    """

    def __init__(self, replica: int = 0) -> None:
        self.replica = replica
        self.admits = True
        self.asked_s = 0.0
        self.failure: OmniError | None = None
        self.capacity: GroupCapacity | None = None
        self.max_sessions = self.quarantined = 0
        self.empty_since_s = 0.0
        self._sessions: dict[str, EngineSession] = {}
        self._without_room: EngineSession | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[EngineSession]:
        """Go through the sessions as they are now, the longest-standing first."""
        return iter(tuple(self._sessions.values()))

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``restarting``, ``draining`` or ``failed``."""
        if self.failure is not None:
            return "failed"
        if not self.admits:
            return "draining"
        if self.capacity is not None:
            return "ready"
        return "restarting" if self.max_sessions else "loading"

    @property
    def held_bytes(self) -> int:
        """Bytes of KV pages that the sessions hold on one rank."""
        group = self.capacity
        return 0 if group is None else self._held_pages(group) * group.page_bytes

    @property
    def serves(self) -> bool:
        """Whether the workers are up and new sessions may get a place."""
        return self.capacity is not None and self.admits

    @property
    def num_free(self) -> int:
        """Number of places that nobody holds."""
        return 0 if self.capacity is None else self.max_sessions - len(self._sessions)

    def offer(self, group: GroupCapacity | None) -> None:
        """Give out the places of a new worker group, or none while there is no group."""
        self.capacity, self._without_room = group, None
        if group is not None:
            self.max_sessions, self.quarantined = group.sessions, group.quarantined
            self.empty_since_s = time.monotonic()

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id if it holds a place."""
        return self._sessions.get(session_id)

    def take(self, session: EngineSession) -> None:
        """Give a session a place."""
        session.replica = self.replica
        self._sessions[session.session_id] = session

    def give_up(self, session: EngineSession) -> None:
        """Free the place of a session."""
        del self._sessions[session.session_id]
        self._without_room = None
        self.empty_since_s = time.monotonic()

    def put_off(self, session: EngineSession) -> None:
        """Free the place of a session for which the workers had no room after all.

        It gets no other place before another session has given up its own.
        """
        self.give_up(session)
        self._without_room = session

    def check_fits(self, size: VideoGeometry) -> None:
        """Refuse what no end of other sessions could make room for.

        Raises:
            OutOfKVMemoryError: if the whole pool is too small.
        """
        group = self.capacity
        if group is None:
            return
        needed = group.pages_for(size.tokens_per_frame)
        if needed > group.num_pages:
            raise OutOfKVMemoryError(
                f"{size} needs {needed * group.page_bytes} bytes of KV "
                f"window, the pool has {group.num_pages * group.page_bytes}; ask for less, or "
                "raise ar_diffusion_height and ar_diffusion_width, max_num_seqs or "
                "gpu_memory_fraction"
            )

    def room(self) -> Room | None:
        """The room that is left for new sessions; ``None`` while none are taken."""
        if self.capacity is None or not self.admits:
            return None
        return Room(
            self.capacity, self.num_free, self._held_pages(self.capacity), self._without_room
        )

    def pick(self, now_s: float) -> EngineSession | None:
        """Return the session whose viewer needs a chunk first, among those that may run now."""
        ready = [
            session
            for session in self._sessions.values()
            if (start := session.runnable_at_s()) is not None and start <= now_s
        ]
        return min(ready, key=lambda session: session.needed_s, default=None)

    def wake_at_s(self) -> float | None:
        """Return when the next session may run, if nobody does anything before."""
        starts = (session.runnable_at_s() for session in self._sessions.values())
        return min((start for start in starts if start is not None), default=None)

    def _held_pages(self, group: GroupCapacity) -> int:
        return sum(_pages(group, session.request) for session in self._sessions.values())


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
        refusal: OutOfKVMemoryError | None = None
        for places in self:
            if not places.serves:
                continue
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
        left = [room for places in self if (room := places.room()) is not None]
        count = 0
        for session in line:
            fitting = [room for room in left if room.fits(session)]
            if not fitting:
                break
            max(fitting, key=lambda room: room.places).take(session)
            count += 1
        return count

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


def _pages(group: GroupCapacity, request: SessionRequest) -> int:
    """Return the number of KV pages that a session takes."""
    return group.pages_for(request.geometry.tokens_per_frame)
