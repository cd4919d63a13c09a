"""How uvicorn carries sockets here: no compression, and no client can hold a connection open."""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from http import HTTPStatus
from pathlib import PurePath

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from vllm_omni.config.server import ServerConfig
from vllm_omni.logger import adopt

_CUT_OFF_S = 15.0
"""How long a client may take to read the end of its session."""
_PING_INTERVAL_S = 20.0
_PING_TIMEOUT_S = 120.0
"""Longer than the stall limit, so that a client who is slow is told so instead of cut off."""
_GRACEFUL_SHARE = 0.2
"""Part of the shutdown limit that is left for open connections once the sessions have ended."""


_PROBES = ("/health", "/metrics")
_LIFE_CYCLE = {"uvicorn", "lifespan"}
"""Folders of uvicorn's code that tells of its own start and end."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
SOCKET_PATH = "/v1/realtime/video"


class VideoSocketProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's protocol, but the connection ends even if the client has stopped reading.

    Uvicorn waits for its unsent bytes without a limit.
    """

    _cut_off: TimerHandle | None = None

    async def run_asgi(self) -> None:
        """Run the application on this socket, then give the client a while to take the end."""
        await super().run_asgi()
        if not self.disconnected:
            self._cut_off = self.loop.call_later(_CUT_OFF_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the limit, since the connection is gone already."""
        if self._cut_off is not None:
            self._cut_off.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End this connection with the server, although the client may have bytes left to read."""
        super().shutdown()
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def uvicorn_config(app: ASGIApp, server: ServerConfig) -> uvicorn.Config:
    """Settings of uvicorn for an application with video sockets.

    Video does not shrink by being compressed again; doing so would cost the event loop about ten
    milliseconds per chunk. Its lines go where ours go, without those that call the application
    started while the model is still to be loaded, and without successful probes.
    """
    _route_logs()
    return uvicorn.Config(
        app,
        ws=VideoSocketProtocol,
        ws_per_message_deflate=False,
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        log_config=None,
        log_level=server.log_level,
        access_log=server.access_log,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        timeout_graceful_shutdown=max(1, int(_GRACEFUL_SHARE * server.shutdown_timeout_s)),
    )


def _route_logs() -> None:
    for name in ("uvicorn", "asyncio"):
        adopt(name)
    access = logging.getLogger("uvicorn.access")
    access.propagate = True  # An earlier server of this process may have switched it off.
    access.addFilter(_is_no_probe)
    logging.getLogger("uvicorn.error").addFilter(_is_no_life_cycle)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Tell whether the access log should have a line: successful health probes are left out."""
    match record.args:
        case (_, "GET", str(path), _, HTTPStatus.OK):
            return path.partition("?")[0] not in _PROBES
    return True


def _is_no_life_cycle(record: logging.LogRecord) -> bool:
    """Tell whether a line is not about uvicorn's own start or end; problems always pass."""
    return record.levelno > logging.INFO or PurePath(record.pathname).parent.name not in _LIFE_CYCLE


def describe_address(address: tuple[object, ...], server: ServerConfig) -> str:
    """Where a client finds the server: the page, where it is served, and the socket of worlds.

    Args:
        address: of the listening socket, as ``getsockname`` gives it; a socket on all addresses
            is named by the loopback one.
    """
    host, port = str(address[0]), address[1]
    shown = _ANY_HOST.get(host, host)
    place = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    secure = "s" if server.ssl_certfile is not None else ""
    page = f"http{secure}://{place}/"
    everywhere = f", on all addresses ({host})" if host in _ANY_HOST else ""
    return (
        f"{page}{' (page)' if server.web_page else ''}, ws{secure}://{place}{SOCKET_PATH}"
        f"{everywhere}"
    )
