"""How uvicorn is set up here: its protocols, its limits, and what of its log is kept."""

from __future__ import annotations

import logging
from functools import partial
from http import HTTPStatus
from pathlib import PurePath

import uvicorn
from starlette.types import ASGIApp

from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server.connections import OpenConnections, connection_limit
from vllm_omni.entrypoints.server.wire_protocols import HttpProtocol, VideoSocketProtocol
from vllm_omni.logger import OnceAMinute, adopt

_KEEP_ALIVE_S = 5
"""How long a connection may be idle after an answer."""
_PING_INTERVAL_S = 20.0
_PING_TIMEOUT_S = 120.0
"""Longer than the stall limit, so that a client who is slow is told so instead of cut off."""
_GRACEFUL_SHARE = 0.2
"""Part of the shutdown limit that is left for open connections once the sessions have ended."""
_NO_DESCRIPTORS = "socket.accept() out of system resource"
_NO_DESCRIPTORS_TEXT = (
    "no descriptor is left to accept a connection with; trying again every second (ulimit -n)"
)
_NOT_UTF8 = "Invalid UTF-8 sequence received from client."
_PROBES = ("/health", "/metrics")
_LIFE_CYCLE = {"uvicorn", "lifespan"}
"""Folders of uvicorn's code that tells of its own start and end."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
SOCKET_PATH = "/v1/realtime/video"


def uvicorn_config(app: ASGIApp, server: ServerConfig) -> uvicorn.Config:
    """Settings of uvicorn for an application with video sockets.

    Video does not shrink by being compressed again; doing so would cost the event loop about ten
    milliseconds per chunk. Its lines go where ours go, without those that call the application
    started while the model is still to be loaded, and without successful probes.
    """
    _route_logs()
    open_connections = OpenConnections(connection_limit())
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, open_connections),  # pyright: ignore[reportArgumentType]
        ws=partial(VideoSocketProtocol, open_connections),  # pyright: ignore[reportArgumentType]
        backlog=open_connections.accepted_at_once,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ws_per_message_deflate=False,
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        log_config=None,
        log_level=server.log_level,
        access_log=server.access_log,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_ciphers=server.ssl_ciphers,
        ssl_cert_reqs=server.client_certificates,
        timeout_graceful_shutdown=max(1, int(_GRACEFUL_SHARE * server.shutdown_timeout_s)),
    )


def _route_logs() -> None:
    for name in ("uvicorn", "asyncio"):
        adopt(name)
    access = logging.getLogger("uvicorn.access")
    if not access.handlers:
        access.propagate = True  # An earlier server of this process may have switched it off.
    access.addFilter(_is_no_probe)
    errors = logging.getLogger("uvicorn.error")
    errors.addFilter(_is_no_life_cycle)
    errors.addFilter(_without_traceback_of_clients)
    logging.getLogger("asyncio").addFilter(_NoDescriptors())


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Tell whether the access log should have a line: successful health probes are left out."""
    match record.args:
        case (_, "GET", str(path), _, HTTPStatus.OK):
            return path.partition("?")[0] not in _PROBES
    return True


def _is_no_life_cycle(record: logging.LogRecord) -> bool:
    """Tell whether a line is not about uvicorn's own start or end; problems always pass."""
    return record.levelno > logging.INFO or PurePath(record.pathname).parent.name not in _LIFE_CYCLE


def _without_traceback_of_clients(record: logging.LogRecord) -> bool:
    """Text that is no UTF-8 is a mistake of a client, not of ours; every line is kept."""
    if record.msg == _NOT_UTF8:
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


class _NoDescriptors(logging.Filter):
    """One line a minute, without a traceback, while the system has no descriptor to accept with.

    The event loop says so for each connection that waits, and tries again every second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tells = OnceAMinute()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to keep a line of the event loop's log."""
        if not record.getMessage().startswith(_NO_DESCRIPTORS):
            return True
        if not self._tells.is_due():
            return False
        record.msg, record.args, record.exc_info = _NO_DESCRIPTORS_TEXT, (), None
        return True


def describe_address(address: object, server: ServerConfig) -> str:
    """Where a client finds the server: the page, where it is served, and the socket of worlds.

    Args:
        address: of the listening socket, as ``getsockname`` gives it; a socket on all addresses
            is named by the loopback one.
    """
    secure = "s" if server.ssl_certfile is not None else ""
    if not isinstance(address, tuple):
        return f"Unix socket {address}, http{secure} and ws{secure}"
    host, port = str(address[0]), address[1]
    shown = _ANY_HOST.get(host, host)
    place = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    page = f"http{secure}://{place}/"
    everywhere = f", on all addresses ({host})" if host in _ANY_HOST else ""
    return (
        f"{page}{' (page)' if server.web_page else ''}, ws{secure}://{place}{SOCKET_PATH}"
        f"{everywhere}"
    )
