"""A client of ``/v1/realtime/video`` for tests: one message at a time, each with a time limit."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

PATIENCE_S = 30.0
"""Longest wait for any one message; reached only when something hangs."""


@functools.cache
def picture_url(seed: int = 0, *, height: int = 64, width: int = 96) -> str:
    """A small noisy picture as a ``data:`` URL."""
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(rgb).save(target, "PNG")
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()


def start_message(**changes: object) -> dict[str, object]:
    """``session.start`` of three live chunks at 64x96; ``None`` leaves a field out."""
    fields = {
        "type": "session.start",
        "prompt": "a harbour at dawn",
        "image_reference": {"image_url": picture_url()},
        "width": 96,
        "height": 64,
        "num_frames": 33,
        "fps": 16,
        "seed": 7,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def camera_event(event_id: str | None = None, **changes: object) -> dict[str, object]:
    """``session.interaction`` that moves the camera forward until further notice."""
    data = {"translation": [0, 0, 0.05], "rotation": [0, 0, 0, 1]}
    event = {"multi_modal_data": {"camera": {"mode": "velocity", "data": data}}}
    interaction = {"event_id": event_id, "event": event} | changes
    return {"type": "session.interaction", "interaction": interaction}


class SocketClient:
    """What a test says and hears.

    Attributes:
        video: all binary frames so far, in order.
        log: the type of everything that came, ``"binary"`` for a binary frame.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.video = b""
        self.log: list[str] = []

    async def say(self, message: dict[str, object] | str | bytes) -> None:
        """Send a message, or raw text or bytes."""
        await self.socket.send(json.dumps(message) if isinstance(message, dict) else message)

    async def hear(self, patience_s: float = PATIENCE_S) -> dict | bytes:
        """The next message."""
        async with asyncio.timeout(patience_s):
            raw = await self.socket.recv()
        if isinstance(raw, bytes):
            self.video += raw
            self.log.append("binary")
            return raw
        message = json.loads(raw)
        self.log.append(message["type"])
        return message

    async def expect(self, kind: str, patience_s: float = PATIENCE_S) -> dict:
        """The next message, which must be of this type."""
        message = await self.hear(patience_s)
        assert not isinstance(message, bytes), f"expected {kind}, got a binary frame"
        assert message["type"] == kind, f"expected {kind}, got {message}"
        return message

    async def until(self, kind: str, patience_s: float = PATIENCE_S) -> dict:
        """Skip to the next message of this type; an ``error`` is never skipped."""
        while True:
            message = await self.hear(patience_s)
            if isinstance(message, bytes):
                continue
            if message["type"] == kind:
                return message
            assert message["type"] != "error", f"waited for {kind}, got {message}"

    async def error(self) -> dict:
        """Skip to the next ``error``."""
        while isinstance(message := await self.hear(), bytes) or message["type"] != "error":
            pass
        return message

    async def chunk(self) -> tuple[dict, bytes]:
        """The next metadata and its binary frame, which must follow at once."""
        metadata = await self.until("video.chunk_metadata")
        payload = await self.hear()
        assert isinstance(payload, bytes), f"no binary frame after its metadata: {payload}"
        assert len(payload) == metadata["byte_length"]
        return metadata, payload

    async def rest(self) -> dict:
        """Read to ``session.done``."""
        return await self.until("session.done")

    async def close_code(self) -> int:
        """The code that the server closes with; nothing may come before it."""
        with pytest.raises(ConnectionClosed) as closed:
            raise AssertionError(f"expected the end, got {await self.hear()!r:.200}")
        assert closed.value.rcvd is not None, "closed without a closing handshake"
        return closed.value.rcvd.code


@asynccontextmanager
async def socket_client(url: str, **options: object) -> AsyncIterator[SocketClient]:
    """Connect; leaving the block closes the socket."""
    # A client that stopped reading does not see the answer to its closing either: soon enough.
    limits = {
        "max_size": None,
        "ping_interval": None,
        "close_timeout": 1,
        "open_timeout": PATIENCE_S,
    }
    async with connect(url, **(limits | options)) as socket:
        yield SocketClient(socket)


async def play(url: str, **changes: object) -> bytes:
    """All bytes of one session that ends well."""
    async with socket_client(url) as client:
        await client.say(start_message(**changes))
        await client.rest()
        return client.video


async def denied(url: str) -> tuple[int, dict]:
    """Status and body of the answer to a handshake that must be denied."""
    with pytest.raises(InvalidStatus) as caught:
        async with socket_client(url):
            raise AssertionError("the socket was opened")
    response = caught.value.response
    assert response.headers["Retry-After"] == "5"
    return response.status_code, json.loads(response.body)["error"]
