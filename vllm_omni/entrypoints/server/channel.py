"""One WebSocket and its state machine: typed messages in and out, one writer at a time.

Each direction has its own states. In each state a set of messages is legal; anything else
raises and names what was expected and what came: a client's mistake is an answerable
``InvalidRequestError``, one of our own is a ``SocketStateError``.

    reading   WAIT_START -> WAIT_VIDEO -> OPEN -> STOPPING -> ENDED
    writing   WAIT_START -> WAIT_VIDEO -> STREAMING <-> PAYLOAD_DUE
                                          STREAMING  -> ENDED
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_omni.entrypoints.server.protocol import ErrorMessage, ServerMessage, VideoChunkMetadata
from vllm_omni.errors import InvalidRequestError, OmniError

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


@dataclass(slots=True)
class SocketState:
    """States of both directions of one socket; changed only by the methods below.

    Attributes:
        reading: what the client may say next.
        writing: what the server may say next.
    """

    reading: ReadState = ReadState.WAIT_START
    writing: WriteState = WriteState.WAIT_START

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self.writing is WriteState.ENDED

    def received(self, message_type: str) -> None:
        """Note a message of the client, before it is acted on.

        Raises:
            InvalidRequestError: not legal now; answer it with an ``error``. Nothing has changed.
        """
        expected = READABLE[self.reading]
        if message_type not in expected:
            raise InvalidRequestError(_out_of_turn("client", self.reading, expected, message_type))
        if message_type == "session.start":
            self.reading, self.writing = ReadState.WAIT_VIDEO, WriteState.WAIT_VIDEO
        elif message_type == "session.stop":
            self.reading = ReadState.STOPPING

    def sending(self, message_type: str) -> None:
        """Note a message of the server, before it is sent; :data:`BINARY` for video bytes.

        Raises:
            SocketStateError: not legal now; the message must not be sent. Nothing has changed.
        """
        expected = WRITABLE[self.writing]
        if message_type not in expected:
            raise SocketStateError(_out_of_turn("server", self.writing, expected, message_type))
        if message_type in _AFTER_WRITE:
            self.writing = _AFTER_WRITE[message_type]
        if message_type == "video.start" and self.reading is ReadState.WAIT_VIDEO:
            self.reading = ReadState.OPEN
        if self.writing is WriteState.ENDED:
            self.reading = ReadState.ENDED

    def end(self) -> None:
        """The socket closes now, after a final ``error`` or because the client has gone."""
        self.reading, self.writing = ReadState.ENDED, WriteState.ENDED


def _out_of_turn(side: str, state: StrEnum, expected: frozenset[str], got: str) -> str:
    wanted = ", ".join(sorted(expected)) or "nothing: the session has ended"
    return f"{side} in state {state}: expected {wanted}; got {got[:60]}"


NORMAL_CLOSURE = 1000
_CLOSE_TIMEOUT_S = 5.0


class ClientGoneError(Exception):
    """The client closed the socket or the network did."""


class ClientTooSlowError(OmniError):
    """The client did not take a message in time; ends the session."""

    code = "client_too_slow"


class SocketChannel:
    """Sends and receives on an accepted socket.

    Args:
        send_timeout_s: how long one message may wait for the client to read.
    """

    def __init__(self, socket: WebSocket, *, send_timeout_s: float) -> None:
        self.state = SocketState()
        self._socket = socket
        self._send_timeout_s = send_timeout_s
        self._lock = asyncio.Lock()

    async def receive(self) -> str:
        """Wait for the next text frame of the client.

        Raises:
            ClientGoneError: if the socket was closed.
            InvalidRequestError: for a binary frame; the socket goes on.
        """
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGoneError
        text = message.get("text")
        if text is None:
            raise InvalidRequestError("binary frames are not part of this protocol; send text")
        return text

    @property
    def is_sending(self) -> bool:
        """Whether a message waits for the client to read; that wait has a limit of its own."""
        return self._lock.locked()

    async def send(self, message: ServerMessage) -> None:
        """Send one message, after those that are being sent.

        Raises:
            ClientGoneError: if the socket was closed.
            ClientTooSlowError: if the client does not read.
        """
        await self.send_text(message.type, message.to_text())

    async def send_text(self, message_type: str, text: str) -> None:
        """:meth:`send` for a message that was turned into text already, off the event loop."""
        async with self._lock:
            self.state.sending(message_type)
            await self._write(text)

    async def send_chunk(self, metadata: VideoChunkMetadata, payload: bytes) -> None:
        """Send metadata and its binary frame with nothing between them."""
        async with self._lock:
            self.state.sending(metadata.type)
            await self._write(metadata.to_text())
            self.state.sending(BINARY)
            await self._write(payload)

    async def send_error(
        self, error: OmniError, *, request_id: str | None = None, event_id: str | None = None
    ) -> None:
        """Tell the client about an error; says nothing once the session has ended."""
        if not self.state.ended:
            await self.send(ErrorMessage.of(error, request_id=request_id, event_id=event_id))

    async def send_last(self, error: OmniError, *, request_id: str) -> None:
        """Say why the session ends, whatever else was due; nobody may be listening any more."""
        if self.state.ended:
            return
        self.state.end()
        text = ErrorMessage.of(error, request_id=request_id).to_text()
        await _attempt(self._socket.send_text(text))

    async def close(self) -> None:
        """Close with 1000; a client that has gone or does not read is no error."""
        self.state.end()
        await _attempt(self._socket.close(NORMAL_CLOSURE))

    async def _write(self, payload: str | bytes) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                if isinstance(payload, str):
                    await self._socket.send_text(payload)
                else:
                    await self._socket.send_bytes(payload)
        except TimeoutError:
            raise ClientTooSlowError(
                f"the client did not read for {self._send_timeout_s:.0f} s"
            ) from None
        except (RuntimeError, WebSocketDisconnect, OSError):
            raise ClientGoneError from None


async def _attempt(last: Awaitable[None]) -> None:
    """Do a last thing on a socket whose client may have gone, or may not read."""
    with suppress(TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await last
