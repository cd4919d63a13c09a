"""Uvicorn's two protocols, but no client can hold a connection open.

Uvicorn has no limit for a request that never comes, none for an answer that nobody reads, and
waits for the unsent bytes of a socket for ever.
"""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio import TimerHandle
from asyncio.transports import BaseTransport

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from vllm_omni.entrypoints.server.connections import Debt, OpenConnections
from vllm_omni.entrypoints.server.http_errors import error_body

REQUEST_TIMEOUT_S = 10.0
"""How long a client may take for the head of a request, after the connection was made or was idle
for as long as it may be; and before that, for the handshake of TLS."""
_UNREAD_TIMEOUT_S = 60.0
"""How long a client may take for the next 64 KiB of an answer, or for what is left of it."""
_REST_TIMEOUT_S = 60.0
"""How long a client may go on sending a body that was answered before it was through."""
_READ_AT_LEAST = 64 * 1024
_LOOK_S = 1.0
_UNSENT_BYTES = 256 * 1024
"""How much the system takes of a video before the client has room for it, instead of four
megabytes: who does not read is noticed sooner, and what is under way is as much as ever."""
_CUT_OFF_S = 15.0
"""How long a client may take to read the end of its session."""
_SMALL_FRAMES = 1000
"""Of a socket in ``_SMALL_FRAMES_S``: pings, pongs and fragments below ``_SMALL_BYTES``."""
_SMALL_FRAMES_S = 10.0
_SMALL_BYTES = 1024
_AT_ONCE = 16 * 1024
"""Bytes of a socket that are taken apart before it is asked whether it may go on."""


class HttpProtocol(H11Protocol):
    """Uvicorn's protocol with time limits, and with the project's body for what is no request.

    Args:
        open_connections: those of the whole server.
        settings: what uvicorn gives its protocols.
    """

    def __init__(self, open_connections: OpenConnections, **settings: object) -> None:
        super().__init__(**settings)  # pyright: ignore[reportArgumentType]
        self._open = open_connections
        self._owes = (Debt.NOTHING, False)
        self._debt_timer: TimerHandle | None = None
        self._unread_timer: TimerHandle | None = None
        self._unread = 0
        self._unread_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client is there; it has to say what it wants."""
        super().connection_made(transport)
        if self._open.opened(transport, Debt.REQUEST):
            self._note(Debt.REQUEST)
        else:
            self._refuse(503, "too many connections are open; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, which is gone."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client, which may complete a request or its body."""
        super().data_received(data)
        self._note(self._owed())

    def on_response_complete(self) -> None:
        """Wait for what the client asks next."""
        super().on_response_complete()
        self._watch_unread()
        self._note(self._owed())

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Another protocol goes on with the connection, and counts it itself."""
        self._leave()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Answer a client that does not speak HTTP."""
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._watch_unread()

    def _watch_unread(self) -> None:
        """End the connection if its client stops reading before the answer is through."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._unread_timer is None:
            self._unread = unread
            self._unread_since_s = self.loop.time()
            self._look_at_unread_later()

    def _look_at_unread_later(self) -> None:
        self._unread_timer = self.loop.call_later(
            min(_LOOK_S, _UNREAD_TIMEOUT_S), self._look_at_unread
        )

    def _look_at_unread(self) -> None:
        self._unread_timer = None
        unread, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if unread == 0:
            self._note(self._owed())
            return
        if abs(self._unread - unread) >= _READ_AT_LEAST:
            self._unread, self._unread_since_s = unread, now_s
        if now_s - self._unread_since_s < _UNREAD_TIMEOUT_S:
            self._look_at_unread_later()
        else:
            self.transport.abort()

    def _owed(self) -> Debt:
        """What the client owes. While it has an answer to read, it owes nothing but to read it."""
        if self.conn.their_state is h11.SEND_BODY:  # Also after an answer that came early.
            return Debt.BODY
        is_read = self._is_answered and self.transport.get_write_buffer_size() == 0
        return Debt.REQUEST if self.cycle is None or is_read else Debt.NOTHING

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being made, or is not yet read to its end."""
        return self._owed() is Debt.NOTHING

    @property
    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _note(self, debt: Debt) -> None:
        if self.transport.get_protocol() is not self:  # A socket by now.
            return
        self._open.owes(self.transport, debt)
        owes = (debt, self._is_answered)
        if self._owes == owes:
            return
        self._owes = owes
        self._debt_timer = _cancelled(self._debt_timer)
        limit_s = self._limit_s(debt)
        if limit_s is not None:
            self._debt_timer = self.loop.call_later(limit_s, self.transport.abort)

    def _limit_s(self, debt: Debt) -> float | None:
        """How long the client may owe it; the application has a limit of its own for bodies."""
        if debt is Debt.REQUEST:
            return REQUEST_TIMEOUT_S + (0 if self.cycle is None else self.timeout_keep_alive)
        return _REST_TIMEOUT_S if debt is Debt.BODY and self._is_answered else None

    def _leave(self) -> None:
        self._open.closed(self.transport)
        self._debt_timer = _cancelled(self._debt_timer)
        self._unread_timer = _cancelled(self._unread_timer)

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and close."""
        body = json.dumps(error_body(status, message)).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class VideoSocketProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's protocol, but the connection ends even if the client has stopped reading.

    Args:
        open_connections: those of the whole server.
        settings: what uvicorn gives its protocols.
    """

    _end_timer: TimerHandle | None = None
    _small_frames = 0
    _small_since_s = 0.0

    def __init__(self, open_connections: OpenConnections, **settings: object) -> None:
        super().__init__(**settings)  # pyright: ignore[reportArgumentType]
        self._open = open_connections

    def connection_made(self, transport: BaseTransport) -> None:
        """The client has asked for a socket; it has to say what for."""
        super().connection_made(transport)
        sending = transport.get_extra_info("socket")
        if sending.family != socket.AF_UNIX:
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if not self._open.opened(self.transport, Debt.START):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client: frames, of which the smallest take thousands of times their work."""
        for start in range(0, len(data), _AT_ONCE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _AT_ONCE])

    def handle_ping(self) -> None:
        """Answer, unless there are too many."""
        if not self.close_sent:
            super().handle_ping()
            self._count_small()

    def handle_pong(self, event: Frame) -> None:
        """Note that the client lives, unless there are too many."""
        super().handle_pong(event)
        self._count_small()

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment to the message that it is of."""
        super().handle_cont(event)
        if len(event.data) < _SMALL_BYTES:
            self._count_small()

    def _count_small(self) -> None:
        """End a socket that sends hardly more than frames."""
        now_s = self.loop.time()
        if now_s - self._small_since_s > _SMALL_FRAMES_S:
            self._small_frames, self._small_since_s = 0, now_s
        self._small_frames += 1
        if self._small_frames > _SMALL_FRAMES and not self.close_sent:
            self.conn.fail(CloseCode.POLICY_VIOLATION, "too many pings, pongs or small fragments")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        """A whole message has come: whether it is a good one, the session says."""
        self._open.owes(self.transport, Debt.NOTHING)
        super().send_receive_event_to_app()

    async def run_asgi(self) -> None:
        """Run the application on this socket, then give the client a while to take the end."""
        await super().run_asgi()
        if not self.disconnected:
            self._end_timer = self.loop.call_later(_CUT_OFF_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, which is gone."""
        self._open.closed(self.transport)
        self._end_timer = _cancelled(self._end_timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End this connection with the server, although the client may have bytes left to read."""
        super().shutdown()
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def _cancelled(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
