"""One WebSocket with its state machine: typed messages in and out, one writer at a time."""

from __future__ import annotations

import asyncio

from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_omni.entrypoints.server.protocol import (
    ErrorMessage,
    ServerMessage,
    VideoChunkMetadata,
)
from vllm_omni.entrypoints.server.socket_state import BINARY, SocketState
from vllm_omni.errors import InvalidRequestError, OmniError

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
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._socket.send_text(
                    ErrorMessage.of(error, request_id=request_id).to_text()
                )
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            return

    async def close(self) -> None:
        """Close with 1000; a client that has gone or does not read is no error."""
        self.state.end()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._socket.close(NORMAL_CLOSURE)
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            return

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
