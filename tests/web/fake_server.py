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
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from vllm_omni.diffusion.geometry import chunk_pixel_frames
from vllm_omni.entrypoints.server import protocol
from vllm_omni.entrypoints.server.media import ChunkEncoder
from vllm_omni.entrypoints.server.web_page import web_page_routes
from vllm_omni.errors import InvalidRequestError

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
    """What the fake does differently from a plain, quick server."""

    queue_positions: tuple[int, ...] = ()
    chunk_s: float = 0.2
    paced: bool = True
    refuse_camera_times: int = 0
    new_stream_on_reset: bool = False


@dataclass
class World:
    """State of one session on the fake."""

    websocket: WebSocket
    start: protocol.SessionStart
    chunk_index: int = 0
    transport_index: int = 0
    pixel_frames: int = 0
    pending: list[protocol.Interaction] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    began: float = 0.0
    reset_asked: bool = False
    stopped: bool = False


class FakeServer:
    """Runs in a thread on a port of 127.0.0.1; can be stopped and started on the same port."""

    def __init__(self) -> None:
        self.script = Script()
        self.received: list[protocol.SessionStart | protocol.ControlMessage] = []
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
                Route("/health", _health),
                Route("/v1/realtime/capabilities", _capabilities),
                Route("/v1/models", _models),
                WebSocketRoute("/v1/realtime/video", self._video),
            ]
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

    def interactions(self) -> list[protocol.Interaction]:
        return [m.interaction for m in self.received if isinstance(m, protocol.SessionInteraction)]

    async def _video(self, websocket: WebSocket) -> None:
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await self._session(websocket)
        with contextlib.suppress(RuntimeError):
            await websocket.close(1000)

    async def _session(self, websocket: WebSocket) -> None:
        start = protocol.parse_start(await websocket.receive_text())
        self.received.append(start)
        for position in self.script.queue_positions:
            await _send(websocket, protocol.SessionQueued(request_id="fake", position=position))
            await asyncio.sleep(0.3)
        accepted = protocol.VideoStart(request_id="fake", config={}, capabilities=CAPABILITIES)
        await _send(websocket, accepted)
        if not start.image_reference.image_url.startswith("data:image/"):
            message = "image_reference: cannot be decoded as a picture; give PNG, JPEG or WebP"
            await _send(websocket, protocol.ErrorMessage(message=message))
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
        if not self.script.paced or world.start.max_lead_ms is None:
            return 0.0
        if world.transport_index <= 1:
            world.began = time.monotonic()
        played = time.monotonic() - world.began
        sent = world.pixel_frames / world.start.fps
        return max(0.0, sent - played - world.start.max_lead_ms / 1e3)

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
                world.reset_asked, world.chunk_index = False, 0
                world.pending.clear()
                if self.script.new_stream_on_reset:
                    encoder = _encoder(world)
                await _send(world.websocket, protocol.SessionResetDone(request_id="fake"))
            await asyncio.sleep(self._lead_s(world))
            started, completed = _fold(world)
            count = chunk_pixel_frames(world.chunk_index)
            frames = _pictures(world, count)
            payload = await asyncio.to_thread(encoder.encode, frames)
            await asyncio.sleep(self.script.chunk_s)
            await _send(
                world.websocket,
                protocol.VideoChunkMetadata(
                    request_id="fake",
                    num_frames=count,
                    byte_length=len(payload),
                    generation_chunk_index=world.chunk_index,
                    started_event_ids=started,
                    completed_event_ids=completed,
                    transport_chunk_index=world.transport_index,
                    applied={event_id: 3 * world.chunk_index for event_id in started},
                ),
            )
            await world.websocket.send_bytes(payload)
            world.chunk_index += 1
            world.transport_index += 1
            world.pixel_frames += count


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


async def _health(_: Request) -> JSONResponse:
    return JSONResponse({"status": "healthy"})


async def _capabilities(_: Request) -> JSONResponse:
    return JSONResponse(CAPABILITIES.model_dump())


async def _models(_: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": "tiny-lingbot-world"}]})
