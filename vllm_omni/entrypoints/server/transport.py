"""How uvicorn carries sockets here: no compression, and no client can hold a connection open."""

from __future__ import annotations

from asyncio import TimerHandle

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from vllm_omni.config.server import ServerConfig

_CUT_OFF_S = 15.0
"""How long a client may take to read the end of its session."""
_PING_INTERVAL_S = 20.0
_PING_TIMEOUT_S = 120.0
"""Longer than the stall limit, so that a client who is slow is told so instead of cut off."""
_GRACEFUL_SHARE = 0.2
"""Part of the shutdown limit that is left for open connections once the sessions have ended."""


class VideoSocketProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's, but the connection ends although the client takes nothing off it any more.

    Uvicorn waits for its unsent bytes without a limit.
    """

    _cut_off: TimerHandle | None = None

    async def run_asgi(self) -> None:
        """Run the application on this socket, then give the client a while to take the end."""
        await super().run_asgi()
        if not self.disconnected:
            self._cut_off = self.loop.call_later(_CUT_OFF_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._cut_off is not None:
            self._cut_off.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: so does this connection."""
        super().shutdown()
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def uvicorn_config(app: ASGIApp, server: ServerConfig) -> uvicorn.Config:
    """Settings of uvicorn for an application with video sockets.

    Video does not shrink by being compressed again; doing so would cost the event loop about ten
    milliseconds per chunk.
    """
    return uvicorn.Config(
        app,
        ws=VideoSocketProtocol,
        ws_per_message_deflate=False,
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        log_level=server.log_level,
        access_log=server.access_log,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        timeout_graceful_shutdown=max(1, int(_GRACEFUL_SHARE * server.shutdown_timeout_s)),
    )
