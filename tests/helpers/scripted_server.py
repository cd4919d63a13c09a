"""A WebSocket server on loopback that plays a script: what a client sees can be written down."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Script = Callable[["Peer"], Awaitable[None]]


@dataclass
class Peer:
    """The server's end of one socket."""

    socket: ServerConnection
    start: dict
    received: list[dict]
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0

    async def tell(self, message_type: str, /, **fields: object) -> None:
        """Send one JSON message."""
        await self.socket.send(json.dumps({"type": message_type, **fields}))

    async def video_start(self) -> None:
        """Acknowledge the start."""
        await self.tell("video.start", request_id="video_stream-1", format="m4s", config={})

    async def chunk(self, index: int, frames: int = 12, payload: bytes = b"video") -> None:
        """Send one media chunk."""
        await self.payload(payload, kind="media", num_frames=frames, generation_chunk_index=index)

    async def payload(self, payload: bytes, **fields: object) -> None:
        """Send metadata and its binary frame."""
        await self.tell(
            "video.chunk_metadata",
            **{"request_id": "video_stream-1", "byte_length": len(payload),
               "started_event_ids": [], "active_event_ids": [], "completed_event_ids": [],
               "transport_chunk_index": self.sent, **fields},
        )  # fmt: skip
        self.sent += 1
        await self.socket.send(payload)

    async def done(self, *, stopped: bool = False) -> None:
        """End the session."""
        await self.tell(
            "session.done", request_id="video_stream-1", chunks=self.sent, stopped=stopped
        )

    async def until(self, kind: str) -> dict:
        """Wait for a message of a type from the client."""
        while True:
            found = [message for message in self.received if message["type"] == kind]
            if found:
                return found[0]
            self.arrived.clear()
            await self.arrived.wait()


@dataclass
class ScriptedServer:
    """A running server: its address and what each socket's client has said."""

    port: int
    peers: list[Peer]

    @property
    def url(self) -> str:
        """Address of the endpoint."""
        return f"ws://127.0.0.1:{self.port}/v1/realtime/video"


@asynccontextmanager
async def scripted_server(script: Script) -> AsyncIterator[ScriptedServer]:
    """Serve ``script`` to every client until the block ends."""
    peers: list[Peer] = []

    async def read(peer: Peer) -> None:
        async for text in peer.socket:
            peer.received.append(json.loads(text))
            peer.arrived.set()

    async def handle(socket: ServerConnection) -> None:
        first = await socket.recv()
        peer = Peer(socket, json.loads(first), [])
        peers.append(peer)
        reader = asyncio.create_task(read(peer))
        try:
            await script(peer)
        except ConnectionClosed:
            pass
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async with serve(handle, "127.0.0.1", 0, max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        yield ScriptedServer(port, peers)
