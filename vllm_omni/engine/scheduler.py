"""Who waits, who has a place on the workers, whose chunk is next. No clocks, no I/O of its own."""

from collections import OrderedDict

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import SessionRequest, WorkerReady
from vllm_omni.engine.session import EngineSession, Waiting
from vllm_omni.errors import OutOfKVMemoryError, ServerFullError


class Scheduler:
    """First come, first served for places; earliest playback deadline first for chunks.

    Nobody passes the head of the line, not even a smaller session for which there are pages: a
    large one would else wait as long as small ones come.

    Args:
        max_queued: sessions that may wait for a place.
    """

    def __init__(self, *, max_queued: int) -> None:
        self.max_queued = max_queued
        self._group: WorkerReady | None = None
        self._max_sessions = 0
        self._refused: EngineSession | None = None
        self._waiting: OrderedDict[str, EngineSession] = OrderedDict()
        self._placed: OrderedDict[str, EngineSession] = OrderedDict()

    @property
    def has_group(self) -> bool:
        """Whether there are workers to place sessions on."""
        return self._group is not None

    @property
    def max_sessions(self) -> int:
        """Places on the workers, or on those that were lost."""
        return self._max_sessions

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

    @property
    def held_bytes(self) -> int:
        """Bytes of KV pages that the placed sessions hold on one rank."""
        group = self._group
        return 0 if group is None else self._held_pages(group) * group.page_bytes

    def find(self, session_id: str) -> EngineSession | None:
        """A session, wherever it stands."""
        return self._waiting.get(session_id) or self._placed.get(session_id)

    def adopt(self, group: WorkerReady) -> None:
        """Give out the places and pages of a new worker group."""
        self._group = group
        self._max_sessions = group.sessions
        self._refused = None

    def lose_group(self) -> None:
        """Place nobody until there is another group."""
        self._group = None

    def check_fits(self, request: SessionRequest) -> None:
        """Refuse what no end of other sessions could make room for.

        Raises:
            OutOfKVMemoryError: if the whole pool is too small.
        """
        group = self._group
        if group is None:
            return
        needed = _pages(group, request)
        if needed > group.num_pages:
            raise OutOfKVMemoryError(
                f"{request.width}x{request.height} needs {needed * group.page_bytes} bytes of KV "
                f"window, the pool has {group.num_pages * group.page_bytes}; ask for less, or "
                "raise ar_diffusion_height and ar_diffusion_width, max_num_seqs or "
                "gpu_memory_fraction"
            )

    def misfits(self) -> list[tuple[EngineSession, OutOfKVMemoryError]]:
        """Who waits for pages that this group does not have, and came before it was there."""
        found = []
        for session in self.waiting:
            try:
                self.check_fits(session.request)
            except OutOfKVMemoryError as error:
                found.append((session, error))
        return found

    def enqueue(self, session: EngineSession) -> None:
        """Put a session at the end of the line.

        Raises:
            ServerFullError: if it would have to wait and the line is full.
        """
        self._waiting[session.session_id] = session
        num_queued = len(self._waiting) - self._num_placeable()
        if num_queued > self.max_queued:
            del self._waiting[session.session_id]
            raise ServerFullError(
                f"{len(self._placed)} of {self._max_sessions} sessions run and "
                f"{num_queued - 1} of {self.max_queued} wait; try again later (max_num_seqs, "
                "max_queued)"
            )

    def next_to_place(self) -> EngineSession | None:
        """The head of the line, if a place and its pages are free."""
        return self.waiting[0] if self._num_placeable() else None

    def place(self, session: EngineSession) -> None:
        """Move a session from the line to a place."""
        del self._waiting[session.session_id]
        self._placed[session.session_id] = session

    def refused(self, session: EngineSession) -> None:
        """The workers had no room for the head after all: try again when a place is given up."""
        self._refused = session

    def remove(self, session: EngineSession) -> bool:
        """Forget a session wherever it stands; whether it stood anywhere."""
        if self._waiting.pop(session.session_id, None) is not None:
            return True
        self._refused = None
        return self._placed.pop(session.session_id, None) is not None

    def announce_positions(self) -> None:
        """Tell its place in the line to every session that has to wait."""
        for position, session in enumerate(self.waiting[self._num_placeable() :], start=1):
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

    def _num_placeable(self) -> int:
        """Sessions at the head of the line that can be placed now."""
        group = self._group
        if group is None:
            return 0
        free_places = max(self._max_sessions - len(self._placed), 0)
        free_pages = group.num_pages - self._held_pages(group)
        for index, session in enumerate(self.waiting[:free_places]):
            free_pages -= _pages(group, session.request)
            if free_pages < 0 or session is self._refused:
                return index
        return min(free_places, len(self._waiting))

    def _held_pages(self, group: WorkerReady) -> int:
        return sum(_pages(group, session.request) for session in self._placed.values())


def _pages(group: WorkerReady, request: SessionRequest) -> int:
    """Pages that a session takes."""
    return group.pages_for(VideoGeometry(request.height, request.width).tokens_per_frame)
