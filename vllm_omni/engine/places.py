"""The places that a worker group has for sessions, in numbers and in pages of its KV pool."""

from collections.abc import Iterable, Iterator

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import GroupCapacity, SessionRequest
from vllm_omni.engine.session import EngineSession
from vllm_omni.errors import OutOfKVMemoryError


class Places:
    """One worker group's capacity and the sessions that hold it. Used by the scheduler alone.

    Attributes:
        capacity: of the group that runs; ``None`` while there is none.
        max_sessions: number of places of this group, or of the one that was lost.
    """

    def __init__(self) -> None:
        self.capacity: GroupCapacity | None = None
        self.max_sessions = 0
        self._sessions: dict[str, EngineSession] = {}
        self._without_room: EngineSession | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[EngineSession]:
        """Go through the sessions as they are now, the longest-standing first."""
        return iter(tuple(self._sessions.values()))

    @property
    def held_bytes(self) -> int:
        """Bytes of KV pages that the sessions hold on one rank."""
        group = self.capacity
        return 0 if group is None else self._held_pages(group) * group.page_bytes

    @property
    def num_free(self) -> int:
        """Number of places that nobody holds."""
        return 0 if self.capacity is None else self.max_sessions - len(self._sessions)

    def offer(self, group: GroupCapacity | None) -> None:
        """Give out the places of a new worker group, or none while there is no group."""
        self.capacity, self._without_room = group, None
        if group is not None:
            self.max_sessions = group.sessions

    def find(self, session_id: str) -> EngineSession | None:
        """Return the session of this id if it holds a place."""
        return self._sessions.get(session_id)

    def take(self, session: EngineSession) -> None:
        """Give a session a place."""
        self._sessions[session.session_id] = session

    def give_up(self, session: EngineSession) -> None:
        """Free the place of a session."""
        del self._sessions[session.session_id]
        self._without_room = None

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

    def num_placeable(self, line: Iterable[EngineSession]) -> int:
        """Return how many sessions at the head of a line can get a place now."""
        group = self.capacity
        if group is None:
            return 0
        free_places = self.max_sessions - len(self._sessions)
        free_pages = group.num_pages - self._held_pages(group)
        count = 0
        for session in line:
            free_pages -= _pages(group, session.request)
            if count >= free_places or free_pages < 0 or session is self._without_room:
                break
            count += 1
        return count

    def pick(self, now_s: float) -> EngineSession | None:
        """Return the session whose viewer needs a chunk first, among those that may run now."""
        ready = [
            session
            for session in self._sessions.values()
            if (start := session.runnable_at_s()) is not None and start <= now_s
        ]
        return min(ready, key=lambda session: session.deadline_s, default=None)

    def wake_at_s(self) -> float | None:
        """Return when the next session may run, if nobody does anything before."""
        starts = (session.runnable_at_s() for session in self._sessions.values())
        return min((start for start in starts if start is not None), default=None)

    def _held_pages(self, group: GroupCapacity) -> int:
        return sum(_pages(group, session.request) for session in self._sessions.values())


def _pages(group: GroupCapacity, request: SessionRequest) -> int:
    """Return the number of KV pages that a session takes."""
    return group.pages_for(request.geometry.tokens_per_frame)
