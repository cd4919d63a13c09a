"""One session as the engine sees it: its status, its events, what the workers do for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_omni.diffusion.geometry import pixel_frames_of
from vllm_omni.diffusion.messages import ChunkPlan, ChunkResult, LiveCamera, SessionRequest
from vllm_omni.engine.interactions import ChunkReceipt, InteractionBox
from vllm_omni.errors import InternalError, InvalidRequestError, OmniError

MAX_RESETS = 16
"""Resets of one session that may wait for one chunk boundary."""


class SessionStatus(StrEnum):
    """Where a session is in its life."""

    WAITING = "waiting"
    """In line for a place on the workers."""
    OPENING = "opening"
    """Got a place; the workers prepare it."""
    OPEN = "open"
    """Holds a place; its next chunk can be planned."""
    RUNNING = "running"
    """A chunk of it is being made, or it is being restarted."""
    CLOSED = "closed"
    """Ended for good; nothing of it is held anywhere."""


_LEGAL = {
    SessionStatus.WAITING: {SessionStatus.OPENING, SessionStatus.CLOSED},
    SessionStatus.OPENING: {SessionStatus.WAITING, SessionStatus.OPEN, SessionStatus.CLOSED},
    SessionStatus.OPEN: {SessionStatus.RUNNING, SessionStatus.CLOSED},
    SessionStatus.RUNNING: {SessionStatus.OPEN, SessionStatus.CLOSED},
    SessionStatus.CLOSED: set(),
}


class EndReason(StrEnum):
    """How the life of a session ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class StopCause(StrEnum):
    """Why a session is stopped before its end."""

    ASKED = "stopped"
    """Its client said so and is content with what it got."""
    ABORTED = "client_abort"
    """Its client gave it up."""
    DISCONNECTED = "client_disconnect"
    """Its client left, or does not read."""
    STALLED = "stalled"
    """It made no progress for too long."""
    FAULT = "fault"
    """Something broke between the engine and the client."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The session stands in line; position 1 is next."""

    position: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The session got its place on the workers, at ``time.monotonic()`` ``at_s``."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk for the client.

    Attributes:
        last: whether the rollout ends with it.
    """

    result: ChunkResult
    receipt: ChunkReceipt
    last: bool


@dataclass(frozen=True, slots=True)
class WasReset:
    """The next chunk is chunk 0 of the restarted world."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a session, sent exactly once.

    Attributes:
        error: set when the session failed.
        peak_bytes: peak memory of the rank that used most, when the rollout was finished.
    """

    reason: EndReason
    error: OmniError | None = None
    peak_bytes: int = 0


SessionEvent = Waiting | Opened | ChunkReady | WasReset | Ended
Sink = Callable[[SessionEvent], None]
"""Takes a session's events on any thread; must not block, raise, or call the engine."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is scheduled.

    Attributes:
        max_lead_ms: how far chunks may be made ahead of playback; ``None`` for no limit.
        max_undelivered: chunks that may wait for the client before the session pauses.
        live: whether somebody watches the chunks as they come.
    """

    max_lead_ms: float | None = None
    max_undelivered: int = 2
    live: bool = False


class EngineSession:
    """The state of one session, which its scheduler alone reads and changes.

    Attributes:
        emit: hands an event to the client's side.
        began_s: arrival or latest reset.
        chunks_made: chunks since then.
        chunks_total: chunks since the arrival.
        undelivered: chunks that wait for the client.
        replica: number of the replica that holds its place, or did so last.
        stop_cause: set once it is to end at the next chunk boundary.
        error: set once a task of the workers raised it; the session ends by it.
        last_chunk_s: when the latest chunk was ready.
        resumed_s: end of the latest pause, which the client caused by not reading.
    """

    def __init__(
        self,
        session_id: str,
        request: SessionRequest,
        sink: Sink,
        *,
        options: SessionOptions,
        now_s: float,
        request_id: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.request_id = request_id
        self.request = request
        self.options = options
        self.interactions = InteractionBox(
            request.prompt, live_camera=isinstance(request.camera, LiveCamera), opened_s=now_s
        )
        self.arrived_s = self.began_s = now_s
        self.chunks_made = self.chunks_total = 0
        self.undelivered = 0
        self.replica = 0
        self.stop_cause: StopCause | None = None
        self.error: OmniError | None = None
        self.resets: list[Callable[[SessionRequest], SessionRequest]] = []
        self.last_chunk_s = self.resumed_s = now_s
        self.emit = sink
        self._playback_s, self._waited_s = now_s, 0.0
        self._resumed_late = False
        self._status = SessionStatus.WAITING

    @property
    def status(self) -> SessionStatus:
        """Where the session is in its life."""
        return self._status

    @property
    def is_waiting(self) -> bool:
        """Whether the session cannot make chunks yet: it stands in line or is being opened."""
        return self._status in {SessionStatus.WAITING, SessionStatus.OPENING}

    @property
    def label(self) -> str:
        """The client's id and the workers' id of the session, for the log."""
        session = f"session {self.session_id}"
        return session if self.request_id is None else f"{self.request_id} ({session})"

    @property
    def finished(self) -> bool:
        """Whether every chunk of the rollout has been made."""
        return self.request.num_chunks is not None and self.chunks_made >= self.request.num_chunks

    @property
    def due_end(self) -> tuple[EndReason, OmniError | None] | None:
        """Why the session ends at this chunk boundary, if it does."""
        if self.error is not None:
            return EndReason.FAILED, self.error
        if self.finished:
            return EndReason.FINISHED, None
        return None if self.stop_cause is None else (EndReason.STOPPED, None)

    def move_to(self, status: SessionStatus) -> None:
        """Go on to another stage of the session's life.

        Raises:
            InternalError: if the change is not a legal one.
        """
        if status not in _LEGAL[self._status]:
            raise InternalError(
                f"session {self.session_id} cannot go from {self._status} to {status}"
            )
        self._status = status

    def runnable_at_s(self) -> float | None:
        """Time from which the next chunk may be made; ``None`` while the client does not read."""
        if self._status is not SessionStatus.OPEN or self.is_paused:
            return None
        if self.options.max_lead_ms is None or self.chunks_made == 0:
            return self.arrived_s
        return self.deadline_s - self.options.max_lead_ms / 1000.0

    @property
    def is_paused(self) -> bool:
        """Whether too many chunks wait for the client."""
        return self.undelivered >= self.options.max_undelivered

    @property
    def deadline_s(self) -> float:
        """When the viewer needs the next chunk; the first one is always due at once."""
        if self.chunks_made == 0:
            return self._playback_s
        return self._playback_s + pixel_frames_of(self.chunks_made) / self.request.fps

    @property
    def needed_s(self) -> float:
        """When the viewer, who has waited for every late chunk, has nothing left to watch.

        Chunks are made in this order. In that of :attr:`deadline_s`, who is behind on a machine
        that is too slow would go before every newcomer for ever.
        """
        return self.deadline_s + self._waited_s

    def keeps_waiting(self, ready_s: float) -> bool:
        """Whether somebody waited for the next chunk, ready now, that could have come in time."""
        could = self.options.live and not self._resumed_late and self.options.max_lead_ms != 0.0
        return could and ready_s > self.deadline_s

    def chunk_made(self, ready_s: float) -> None:
        """Count a chunk that goes to the client."""
        self._resumed_late = False
        if self.chunks_made == 0:
            self._playback_s, self._waited_s = ready_s, 0.0
        self._waited_s += max(ready_s - self.needed_s, 0.0)
        self.last_chunk_s = ready_s
        self.chunks_made += 1
        self.chunks_total += 1
        self.undelivered += 1

    def delivered(self, now_s: float) -> None:
        """The client has taken a chunk.

        One whose pause outlasted its deadline plays on from here: what the client missed by not
        reading is no debt that other sessions would have to wait for.
        """
        was_paused = self.is_paused
        self.undelivered -= 1
        if was_paused and not self.is_paused:
            self.resumed_s = now_s
            self._resumed_late = now_s >= self.deadline_s
            if self._resumed_late:
                self._playback_s += now_s - self.deadline_s
                self._waited_s = 0.0

    def add_reset(self, change: Callable[[SessionRequest], SessionRequest]) -> None:
        """Restart at the next chunk boundary, after the resets that wait already.

        Raises:
            InvalidRequestError: if too many wait.
        """
        if len(self.resets) >= MAX_RESETS:
            raise InvalidRequestError(
                f"{MAX_RESETS} resets wait for the next chunk already; send fewer per chunk"
            )
        self.resets.append(change)

    def request_after_resets(self) -> SessionRequest:
        """What the session is asked for once all waiting resets are applied, in order."""
        request = replace(self.request, prompt=self.interactions.prompt)
        resets, self.resets = self.resets, []
        for change in resets:
            request = change(request)
        return request

    def restart(self, request: SessionRequest, now_s: float) -> None:
        """Begin again from chunk 0 with another request."""
        self.request = request
        self.chunks_made = 0
        self.began_s = self._playback_s = now_s
        self._waited_s = 0.0
        self.interactions.restart(request.prompt)


@dataclass(frozen=True, slots=True)
class OpenTask:
    """Open a session on the workers."""

    session: EngineSession


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """Make the next chunk of a session.

    Attributes:
        receipt: what the client is told about its events together with the chunk.
    """

    session: EngineSession
    plan: ChunkPlan
    receipt: ChunkReceipt


@dataclass(frozen=True, slots=True)
class RestartTask:
    """Begin a session on the workers anew with another request."""

    session: EngineSession
    request: SessionRequest


@dataclass(frozen=True, slots=True)
class EndTask:
    """Close a session on the workers for good; nobody can call it any more."""

    session: EngineSession
    reason: EndReason
    error: OmniError | None


Task = OpenTask | ChunkTask | RestartTask | EndTask
