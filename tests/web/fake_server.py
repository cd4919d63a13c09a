"""A server that speaks the socket's protocol from a script and streams real video; no model.

Every message of the client is parsed with the product's own parser, so a page that sends
something outside the protocol ends its session with an error, as with the real server.
"""

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import uvicorn
from PIL import Image, ImageDraw
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.geometry import chunk_pixel_frames
from vllm_omni.entrypoints.server import protocol
from vllm_omni.entrypoints.server.access import AccessControl, chosen_subprotocol
from vllm_omni.entrypoints.server.web_page import web_page_routes
from vllm_omni.errors import InvalidRequestError
from vllm_omni.outputs.media import ChunkEncoder

CAPABILITIES = protocol.Capabilities(
    height=144,
    width=256,
    frames_first_chunk=9,
    frames_per_chunk=12,
    native_fps=16.0,
    max_prompt_tokens=512,
    modalities=["camera", "prompt"],
    max_sessions=1,
)


@dataclass
class Script:
    """What the fake does differently from a plain, quick server.

    Attributes:
        chunk_s: time that a chunk takes.
        uneven_s: added to it, chunk by chunk, again and again.
        paced: whether it keeps to the client's lead.
        unready: body of ``/health`` while it cannot serve; sessions wait in line meanwhile.
        lets_in: whether a socket is accepted at all.
        refusal: answer to a start message.
    """

    queue_positions: tuple[int, ...] = ()
    chunk_s: float = 0.2
    uneven_s: tuple[float, ...] = (0.0,)
    paced: bool = True
    refuse_camera_times: int = 0
    new_stream_on_reset: bool = False
    unready: dict[str, object] | None = None
    lets_in: bool = True
    refusal: protocol.ErrorMessage | None = None


@dataclass
class World:
    """State of one session on the fake."""

    websocket: WebSocket
    start: protocol.SessionStart
    chunk_index: int = 0
    transport_index: int = 0
    pixel_frames: int = 0
    frames_of_world: int = 0
    pending: list[protocol.Interaction] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    began: float = 0.0
    reset_asked: bool = False
    stopped: bool = False

    def restart(self) -> None:
        """Begin again from chunk 0, at a pace of its own; what waited for a chunk is gone."""
        self.reset_asked, self.chunk_index, self.frames_of_world = False, 0, 0
        self.pending.clear()

    def made(self, pixel_frames: int) -> None:
        """Count a chunk; playback is taken to begin with the first."""
        if self.chunk_index == 0:
            self.began = time.monotonic()
        self.chunk_index += 1
        self.transport_index += 1
        self.pixel_frames += pixel_frames
        self.frames_of_world += pixel_frames


class FakeServer:
    """Runs in a thread on a port of 127.0.0.1; can be stopped and started on the same port.

    Attributes:
        requests: path and query of everything that was asked for, sockets included.
        slip_s: most that a chunk came later than the script says, as on a busy machine.
    """

    def __init__(self, *, api_keys: tuple[str, ...] = ()) -> None:
        self.script = Script()
        self.received: list[protocol.SessionStart | protocol.ControlMessage] = []
        self.requests: list[str] = []
        self.slip_s = 0.0
        self.change_keys(api_keys)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        app = Starlette(
            routes=[
                *web_page_routes(),
                Route("/health", self._health),
                Route("/v1/realtime/capabilities", _capabilities),
                Route("/v1/models", _models),
                WebSocketRoute("/v1/realtime/video", self._video),
            ],
            middleware=[
                Middleware(_Noted, addresses=self.requests),
                Middleware(_Guarded, server=self),
            ],
        )
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self.port, log_level="critical", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        """Cut every connection, as a killed process does."""
        if self._server is None or self._thread is None:
            return
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(timeout=20)
        self._server = self._thread = None

    def change_keys(self, api_keys: tuple[str, ...]) -> None:
        """From now on, let in who has one of these."""
        self.config = ServerConfig(("tiny-lingbot-world",), api_keys=api_keys)

    def interactions(self) -> list[protocol.Interaction]:
        return [m.interaction for m in self.received if isinstance(m, protocol.SessionInteraction)]

    async def _health(self, _: Request) -> JSONResponse:
        unready = self.script.unready
        return JSONResponse(unready or {"status": "healthy"}, 503 if unready else 200)

    async def _video(self, websocket: WebSocket) -> None:
        if not self.script.lets_in:
            await websocket.close()
            return
        await websocket.accept(chosen_subprotocol(websocket.scope["subprotocols"]))
        with contextlib.suppress(WebSocketDisconnect):
            await self._session(websocket)
        with contextlib.suppress(RuntimeError):
            await websocket.close(1000)

    async def _session(self, websocket: WebSocket) -> None:
        start = protocol.parse_start(await websocket.receive_text())
        self.received.append(start)
        if self.script.refusal is not None:
            await _send(websocket, self.script.refusal)
            return
        for position in self.script.queue_positions:
            await _send(websocket, protocol.SessionQueued(request_id="fake", position=position))
            await asyncio.sleep(0.3)
        if self.script.unready is not None:
            await _send(websocket, protocol.SessionQueued(request_id="fake", position=1))
        while self.script.unready is not None:
            await asyncio.sleep(0.05)
        accepted = protocol.VideoStart(request_id="fake", config={}, capabilities=CAPABILITIES)
        await _send(websocket, accepted)
        if not start.image_reference.image_url.startswith("data:image/"):
            message = "image_reference: cannot be decoded as a picture; give PNG, JPEG or WebP"
            refusal = protocol.ErrorMessage(message=message, code="invalid_request")
            await _send(websocket, refusal)
            return
        world = World(websocket, start)
        reader = asyncio.create_task(self._read(world))
        try:
            await self._generate(world)
        finally:
            reader.cancel()
        done = protocol.SessionDone(request_id="fake", chunks=world.transport_index, stopped=True)
        await _send(websocket, done)

    def _lead_s(self, world: World) -> float:
        """Seconds to wait so that the client's buffer stays within its lead."""
        lead_ms = world.start.max_lead_ms
        if not self.script.paced or lead_ms is None or world.chunk_index == 0:
            return 0.0
        played = time.monotonic() - world.began
        return max(0.0, world.frames_of_world / world.start.fps - played - lead_ms / 1e3)

    async def _read(self, world: World) -> None:
        while True:
            text = await world.websocket.receive_text()
            try:
                message = protocol.parse_control(text)
            except InvalidRequestError as error:
                await _send(world.websocket, protocol.ErrorMessage.of(error))
                continue
            self.received.append(message)
            await self._obey(world, message)

    async def _obey(self, world: World, message: protocol.ControlMessage) -> None:
        if isinstance(message, protocol.SessionPing):
            await _send(world.websocket, protocol.SessionPong())
        elif isinstance(message, protocol.SessionStop):
            world.stopped = True
        elif isinstance(message, protocol.SessionReset):
            world.reset_asked = True
        elif isinstance(message, protocol.SessionInteraction):
            await self._interact(world, message.interaction)

    async def _interact(self, world: World, interaction: protocol.Interaction) -> None:
        if interaction.event.prompt is None and self.script.refuse_camera_times:
            self.script.refuse_camera_times -= 1
            refusal = protocol.ErrorMessage(
                message="the queue is full", code="interaction_failed",
                event_id=interaction.event_id,
            )  # fmt: skip
            await _send(world.websocket, refusal)
            return
        world.pending.append(interaction)
        queued = protocol.SessionInteractionQueued(request_id="fake", event_id=interaction.event_id)
        await _send(world.websocket, queued)

    async def _generate(self, world: World) -> None:
        encoder = _encoder(world)
        while not world.stopped:
            if world.reset_asked:
                world.restart()
                if self.script.new_stream_on_reset:
                    encoder = _encoder(world)
                await _send(world.websocket, protocol.SessionResetDone(request_id="fake"))
            await asyncio.sleep(self._lead_s(world))
            await self._chunk(world, encoder)

    async def _chunk(self, world: World, encoder: ChunkEncoder) -> None:
        began = time.monotonic()
        started, completed = _fold(world)
        count = chunk_pixel_frames(world.chunk_index)
        payload = await asyncio.to_thread(encoder.encode, _pictures(world, count))
        uneven_s = self.script.uneven_s
        ready = began + self.script.chunk_s + uneven_s[world.transport_index % len(uneven_s)]
        await asyncio.sleep(max(0.0, ready - time.monotonic()))
        self.slip_s = max(self.slip_s, time.monotonic() - ready)
        metadata = protocol.VideoChunkMetadata(
            request_id="fake",
            num_frames=count,
            byte_length=len(payload),
            generation_chunk_index=world.chunk_index,
            started_event_ids=started,
            completed_event_ids=completed,
            transport_chunk_index=world.transport_index,
            applied={event_id: 3 * world.chunk_index for event_id in started},
        )
        await _send(world.websocket, metadata)
        await world.websocket.send_bytes(payload)
        world.made(count)


async def _send(websocket: WebSocket, message: protocol.ServerMessage) -> None:
    await websocket.send_text(message.to_text())


def _encoder(world: World) -> ChunkEncoder:
    return ChunkEncoder(world.start.width, world.start.height, world.start.fps)


def _fold(world: World) -> tuple[list[str], list[str]]:
    """Start what is pending; a prompt completes one chunk after it has started."""
    completed = [event_id for event_id, due in world.prompts.items() if due <= world.chunk_index]
    for event_id in completed:
        del world.prompts[event_id]
    started = [interaction.event_id for interaction in world.pending]
    for interaction in world.pending:
        if interaction.event.prompt is not None:
            world.prompts[interaction.event_id] = world.chunk_index + 1
    world.pending.clear()
    return started, completed


def _pictures(world: World, count: int) -> np.ndarray:
    """A scene that drifts, with a moving marker, so that every picture differs."""
    width, height = world.start.width, world.start.height
    pictures = []
    for index in range(world.pixel_frames, world.pixel_frames + count):
        picture = Image.new("RGB", (width, height), (92, 128, 168))
        pen = ImageDraw.Draw(picture)
        horizon = height * 0.55
        pen.rectangle((0, horizon, width, height), fill=(88, 112, 84))
        for tree in range(8):
            x = (tree * 0.17 * width - index * width * 0.006) % (1.2 * width) - 0.1 * width
            top = horizon - height * (0.12 + 0.03 * (tree % 3))
            pen.polygon(
                [(x, top), (x - width * 0.035, horizon), (x + width * 0.035, horizon)],
                fill=(52, 78 + 6 * tree, 62),
            )
        pictures.append(np.asarray(picture))
    return np.stack(pictures)


class _Noted:
    """ASGI middleware that writes down every address."""

    def __init__(self, app: ASGIApp, addresses: list[str]) -> None:
        self._app = app
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"}:
            self._addresses.append(f"{scope['path']}?{scope['query_string'].decode()}")
        await self._app(scope, receive, send)


class _Guarded:
    """ASGI middleware: the product's access control, with the keys of the moment."""

    def __init__(self, app: ASGIApp, server: FakeServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await AccessControl(self._app, self._server.config)(scope, receive, send)


async def _capabilities(_: Request) -> JSONResponse:
    return JSONResponse(CAPABILITIES.model_dump())


async def _models(_: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": "tiny-lingbot-world"}]})
