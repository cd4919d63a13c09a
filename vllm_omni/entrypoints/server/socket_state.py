"""The server's side of one socket as a guarded state machine without I/O.

Each direction has its own states. In each state a set of messages is legal; anything else
raises and names what was expected and what came: a client's mistake is an answerable
``InvalidRequestError``, one of our own is a ``SocketStateError``.

    reading   WAIT_START -> WAIT_VIDEO -> OPEN -> STOPPING -> ENDED
    writing   WAIT_START -> WAIT_VIDEO -> STREAMING <-> PAYLOAD_DUE
                                          STREAMING  -> ENDED
"""

from enum import StrEnum

from vllm_omni.errors import InvalidRequestError

BINARY = "binary"
"""Name of a binary frame among the message types."""


class ReadState(StrEnum):
    """What the client may say."""

    WAIT_START = "wait_start"
    WAIT_VIDEO = "wait_video"
    """The start was accepted and ``video.start`` is not sent yet (waiting in line)."""
    OPEN = "open"
    STOPPING = "stopping"
    ENDED = "ended"


class WriteState(StrEnum):
    """What the server may say."""

    WAIT_START = "wait_start"
    WAIT_VIDEO = "wait_video"
    STREAMING = "streaming"
    PAYLOAD_DUE = "payload_due"
    """Chunk metadata was sent: nothing may come between it and its binary frame."""
    ENDED = "ended"


class SocketStateError(RuntimeError):
    """The server was about to break its own protocol."""


READABLE: dict[ReadState, frozenset[str]] = {
    ReadState.WAIT_START: frozenset({"session.start"}),
    ReadState.WAIT_VIDEO: frozenset({"session.ping", "session.stop"}),
    ReadState.OPEN: frozenset(
        {"session.ping", "session.stop", "session.interaction", "session.reset"}
    ),
    ReadState.STOPPING: frozenset({"session.ping", "session.stop"}),
    ReadState.ENDED: frozenset(),
}
"""Messages of the client that are legal in each state."""
WRITABLE: dict[WriteState, frozenset[str]] = {
    WriteState.WAIT_START: frozenset({"error"}),
    WriteState.WAIT_VIDEO: frozenset(
        {"error", "session.queued", "session.pong", "session.done", "video.start"}
    ),
    WriteState.STREAMING: frozenset({
        "error", "session.pong", "session.done", "session.reset.done",
        "session.interaction.queued", "video.chunk_metadata",
    }),
    WriteState.PAYLOAD_DUE: frozenset({BINARY}),
    WriteState.ENDED: frozenset(),
}  # fmt: skip
"""Messages of the server that are legal in each state."""
_AFTER_WRITE: dict[str, WriteState] = {
    "video.start": WriteState.STREAMING,
    "video.chunk_metadata": WriteState.PAYLOAD_DUE,
    BINARY: WriteState.STREAMING,
    "session.done": WriteState.ENDED,
}


class SocketState:
    """States of both directions of one socket; changed only by the methods below."""

    def __init__(self) -> None:
        self._reading = ReadState.WAIT_START
        self._writing = WriteState.WAIT_START

    @property
    def reading(self) -> ReadState:
        """What the client may say next."""
        return self._reading

    @property
    def writing(self) -> WriteState:
        """What the server may say next."""
        return self._writing

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self._writing is WriteState.ENDED

    def received(self, message_type: str) -> None:
        """Note a message of the client, before it is acted on.

        Raises:
            InvalidRequestError: not legal now; answer it with an ``error``. Nothing has changed.
        """
        expected = READABLE[self._reading]
        if message_type not in expected:
            raise InvalidRequestError(_text("client", self._reading, expected, message_type))
        if message_type == "session.start":
            self._reading, self._writing = ReadState.WAIT_VIDEO, WriteState.WAIT_VIDEO
        elif message_type == "session.stop":
            self._reading = ReadState.STOPPING

    def sending(self, message_type: str) -> None:
        """Note a message of the server, before it is sent; :data:`BINARY` for video bytes.

        Raises:
            SocketStateError: not legal now; the message must not be sent. Nothing has changed.
        """
        expected = WRITABLE[self._writing]
        if message_type not in expected:
            raise SocketStateError(_text("server", self._writing, expected, message_type))
        if message_type in _AFTER_WRITE:
            self._writing = _AFTER_WRITE[message_type]
        if message_type == "video.start" and self._reading is ReadState.WAIT_VIDEO:
            self._reading = ReadState.OPEN
        if self._writing is WriteState.ENDED:
            self._reading = ReadState.ENDED

    def end(self) -> None:
        """The socket closes now, after a final ``error`` or because the client has gone."""
        self._reading, self._writing = ReadState.ENDED, WriteState.ENDED


def _text(side: str, state: StrEnum, expected: frozenset[str], got: str) -> str:
    wanted = ", ".join(sorted(expected)) or "nothing: the session has ended"
    return f"{side} in state {state}: expected {wanted}; got {got[:60]}"
