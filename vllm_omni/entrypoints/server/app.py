"""The HTTP and WebSocket application and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from vllm_omni import __version__
from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.executor.worker_group import kill_fork_server
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.access import AccessControl, chosen_subprotocol
from vllm_omni.entrypoints.server.channel import SocketChannel
from vllm_omni.entrypoints.server.connections import BACKLOG
from vllm_omni.entrypoints.server.http_errors import (
    OneErrorShape,
    answer_error,
    answer_http_exception,
    answer_wrong_parameters,
    error_response,
    refusal_of_handshake,
)
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.entrypoints.server.openapi import api_page_route, describe
from vllm_omni.entrypoints.server.operations import admin_router, operations_router
from vllm_omni.entrypoints.server.realtime_video import SESSION_PREFIX, RealtimeVideoSession, Timers
from vllm_omni.entrypoints.server.request_ids import RequestIds, name_request
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.tracing import traces_of
from vllm_omni.entrypoints.server.transport import SOCKET_PATH, describe_address, uvicorn_config
from vllm_omni.entrypoints.server.videos import videos_router
from vllm_omni.entrypoints.server.web_page import web_page_routes
from vllm_omni.entrypoints.server.wire_protocols import REQUEST_TIMEOUT_S, HttpProtocol
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger
from vllm_omni.system_errors import is_refusal, sentence

logger = get_logger(__name__)

TITLE = "vllm-omni"
_LAG_PERIOD_S = 0.1
_DRAIN_POLL_S = 0.05
_DRAIN_SHARE = 0.6
"""Part of the shutdown limit for running chunks and answers; what is left ends in the rest."""
_WORKER_END_S = 2.0


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Put in front of all routes what each request passes; the last one that is added is first."""
    config = state.config
    app.add_middleware(AccessControl, config=config)
    if config.allowed_origins:
        # In front of the access control: a preflight carries no key, and a page may read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["*"],
        )
    app.add_middleware(OneErrorShape)
    app.add_middleware(RequestIds, traces=state.traces)


def _answer_head(router: APIRouter) -> None:
    """Let HEAD ask whatever GET asks."""
    for route in router.routes:
        methods = route.methods if isinstance(route, APIRoute) else None
        if methods and "GET" in methods:
            methods.add("HEAD")


def create_app(state: ServerState, timers: Timers | None = None) -> FastAPI:
    """The application; it starts nothing, and serves before the engine is ready."""
    limits = timers or Timers()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lag = asyncio.create_task(_measure_lag(state), name="event loop lag")
        yield
        lag.cancel()
        state.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title=TITLE,
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if state.config.api_page else None,
    )
    app.root_path = state.config.root_path
    app.add_exception_handler(OmniError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(RequestValidationError, answer_wrong_parameters)
    app.add_exception_handler(Exception, answer_error)
    _add_middleware(app, state)
    routers = [operations_router(state), videos_router(state)]
    if state.config.admin_keys:
        routers.append(admin_router(state))
    if state.config.api_page:
        schema = describe(routers, title=TITLE, needs_key=bool(state.config.api_keys))
        app.openapi = lambda: schema  # The framework's way to have a schema of one's own.
        app.router.routes.append(api_page_route(schema))
    for router in routers:
        _answer_head(router)  # After its description, which does not repeat GET as HEAD.
        app.include_router(router)

    if state.config.web_page:
        app.router.routes.extend(web_page_routes())

    @app.websocket(SOCKET_PATH)
    async def realtime_video(socket: WebSocket) -> None:
        refusal = refusal_of_handshake(state)
        if refusal is not None:
            await socket.send_denial_response(error_response(refusal))
            return
        name_request(SESSION_PREFIX)
        await socket.accept(chosen_subprotocol(socket.scope["subprotocols"]))
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        state.sockets.add(task)
        try:
            channel = SocketChannel(socket, send_timeout_s=limits.stall)
            await RealtimeVideoSession(channel, state, limits).run()
        finally:
            state.sockets.discard(task)

    return app


async def _measure_lag(state: ServerState) -> None:
    """Observe how late a timer fires: work that should not be on the loop shows here."""
    while True:
        due = time.monotonic() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        state.client.engine.metrics.event_loop_lag_s.observe(max(time.monotonic() - due, 0.0))


class EngineServer(uvicorn.Server):
    """Uvicorn with an engine: starts it beside the first answers, drains it at the end.

    Attributes:
        exit_status: 0 after an orderly end, 1 if the engine did not start or was lost.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._ending: asyncio.Task[None] | None = None
        self._end_by_s: float | None = None
        self._where = ""
        self.exit_status = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal arrives or the engine is lost."""
        if sockets:
            self._where = describe_address(sockets[0].getsockname(), self._state.config)
        logger.info("listening, and loading the model: %s", self._where)
        engine = asyncio.create_task(self._run_engine(), name="engine start")
        engine.add_done_callback(self._engine_ended)
        try:
            await super().serve(sockets)
        finally:
            engine.cancel()
            for fault in await asyncio.gather(engine, return_exceptions=True):
                if isinstance(fault, Exception):
                    logger.critical("the engine stopped by a bug", exc_info=fault)
            await asyncio.gather(
                asyncio.to_thread(self._state.client.engine.close, self._time_left_s()),
                asyncio.to_thread(self._state.traces.close),
            )
            logger.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Treat a lost terminal like a stop, unless it was to be outlived (nohup)."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is signal.SIG_IGN or threading.current_thread() != threading.main_thread():
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, a few at a time; as many as ever may wait for it."""
        await super().startup([])
        for listener in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                self._protocol,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=REQUEST_TIMEOUT_S if self.config.is_ssl else None,
                backlog=self.config.backlog,
            )
            self.servers.append(server)
            listener.listen(BACKLOG)

    def _protocol(self) -> asyncio.Protocol:
        settings = {"config": self.config, "server_state": self.server_state}
        return self.config.http_protocol_class(**settings, app_state=self.lifespan.state)  # pyright: ignore[reportCallIssue]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: stop admission, drain, tell clients. Second: stop now."""
        if self._ending is not None:
            super().handle_exit(sig, frame)
            return
        logger.info("%s: draining", signal.Signals(sig).name)
        # Not here: a signal may come while this thread is in the middle of a call of the engine.
        self._ending = asyncio.get_event_loop().create_task(self._end_when_drained())

    async def _run_engine(self) -> None:
        try:
            await self._keep_engine()
        except OmniError as error:
            logger.critical("%s", error)
        except (OSError, MemoryError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            logger.critical("the engine could not start: %s", sentence(error))

    def _engine_ended(self, engine: asyncio.Task[None]) -> None:
        """Give up, unless it is the server that ends."""
        if not engine.cancelled():
            self.exit_status, self.should_exit = 1, True

    async def _keep_engine(self) -> None:
        """Start the engine; raises what it ends with."""
        engine = self._state.client.engine
        limit_s = self._state.client.deployment.config.init_timeout_s
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.to_thread(engine.start)
        except TimeoutError:
            raise WorkerFailedError(
                f"the engine did not start within {limit_s:g} s (init_timeout)"
            ) from None
        logger.info("ready after %.1f s: %s", time.monotonic() - started, self._where)
        while engine.failure is None:
            await asyncio.sleep(_LAG_PERIOD_S)
        raise engine.failure

    async def _end_when_drained(self) -> None:
        engine, config = self._state.client.engine, self._state.config
        engine.close_admission()
        drained_by_s = time.monotonic() + config.drain_timeout_s
        while (engine.num_sessions or self._is_answering) and time.monotonic() < drained_by_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._end_by_s = time.monotonic() + config.shutdown_timeout_s
        engine.drain()
        deadline = time.monotonic() + _DRAIN_SHARE * config.shutdown_timeout_s
        while (self._state.sockets or self._is_answering) and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        self.should_exit = True

    @property
    def _is_answering(self) -> bool:
        """Whether a request over HTTP, a whole video perhaps, is not answered to its end."""
        connections = self.server_state.connections
        return any(isinstance(one, HttpProtocol) and one.is_answering for one in connections)

    def _time_left_s(self) -> float:
        """For the engine to end by itself."""
        if self._end_by_s is None:
            return self._state.config.shutdown_timeout_s
        return max(self._end_by_s - time.monotonic() - _WORKER_END_S, 0.0)


def run_server(
    resolved: ResolvedDeployment, *, server: ServerConfig, listener: socket.socket
) -> int:
    """Serve on a bound socket until SIGTERM or SIGINT.

    Returns:
        Exit status of the process.
    """
    client = EngineClient.create(resolved, model_name=server.served_model_names[0], warm_up=True)
    try:
        return serve_engine(client, server=server, listener=listener)
    finally:
        # By itself it would take torch apart first: for seconds, where others need the machine.
        kill_fork_server()


def serve_engine(client: EngineClient, *, server: ServerConfig, listener: socket.socket) -> int:
    """:func:`run_server` for an engine that is made but not started."""
    uvicorn_server = engine_server(client, server, listener)
    uvicorn_server.run(sockets=[listener])
    return uvicorn_server.exit_status


def engine_server(
    client: EngineClient, server: ServerConfig, listener: socket.socket
) -> EngineServer:
    """What will serve on a bound socket."""
    # Whether strangers reach it, its address says, not how --host spells that.
    host = str(listener.getsockname()[0]) if server.uds is None else None
    server = replace(server, host=host)
    images = ImageSource(server.allowed_media_domains)
    state = ServerState(client, server, images=images, traces=traces_of(server))
    return EngineServer(uvicorn_config(create_app(state), server), state)
