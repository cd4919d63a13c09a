"""One world over one socket."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from vllm_omni.client import address as server
from vllm_omni.client.camera import Pose, pose_of_keys
from vllm_omni.client.errors import (
    ConnectionLostError,
    EventRefusedError,
    ProtocolError,
    WorldRefusedError,
)
from vllm_omni.entrypoints.server.protocol import (
    Capabilities,
    ErrorMessage,
    ServerMessage,
    SessionDone,
    SessionQueued,
    VideoChunkMetadata,
    VideoStart,
)

if TYPE_CHECKING:
    from vllm_omni.outputs.media import FrameDecoder

LOCAL_SERVER = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part of a world's video.

    Attributes:
        index: of the chunk since the start or the last reset, from 0.
        data: bytes of one fragmented MP4, which all parts in order make up.
        started: ids of the events that took effect in it; :attr:`active` and :attr:`completed` go
            on from there.
        applied: latent frame of the rollout at which each event took effect.
        frames: pixel frames, where the client decodes them, else ``None``.
    """

    index: int
    num_frames: int
    data: bytes
    started: tuple[str, ...]
    active: tuple[str, ...]
    completed: tuple[str, ...]
    applied: Mapping[str, int]
    frames: UInt8[np.ndarray, "frames height width 3"] | None


class WorldClient:
    """Opens a world, steers it, and gives its video chunk by chunk.

    Reading is what drives it: the server waits for a viewer who does not read, and errors of the
    server are raised where the video is read. A world cannot be taken up again after
    ``ConnectionLostError`` or ``worker_restarted``: nothing reconnects by itself; wait with
    :meth:`wait_ready`, then open a new client.

    Args:
        address: of the server, with any scheme; the path of a proxy may follow.
        api_key: where the server wants one.
        decode: whether chunks have their frames as pixels, which takes PyAV's time.
        keep_video: whether :meth:`save` works; an endless walk grows by what it receives.
        ping_interval_s: between two signs of life while nothing else is said; 0 for none.

    Attributes:
        position: place in the waiting line (1 is next), ``None`` outside of it.
        started: what the server understood, once the world is open.
        done: how the world ended, once it has.
    """

    def __init__(
        self,
        address: str = LOCAL_SERVER,
        *,
        api_key: str | None = None,
        decode: bool = False,
        keep_video: bool = True,
        ping_interval_s: float | int = 20.0,
    ) -> None:
        self._address = address
        self._api_key = api_key
        self._decoder = _frame_decoder() if decode else None
        self._keep_video = keep_video
        self._ping_interval_s = ping_interval_s
        self._socket: ClientConnection | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []
        self._events = 0
        self._has_chunk = False
        self._refusal: WorldRefusedError | None = None
        self.position: int | None = None
        self.started: VideoStart | None = None
        self.done: SessionDone | None = None

    async def __aenter__(self) -> "WorldClient":
        """Connect to the server as ``connect`` does."""
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection, which ends a world that still runs."""
        await self.close()

    # ------------------------------------------------------------ the server

    async def capabilities(self) -> Capabilities:
        """What the server can do: its size, its chunks, its rate."""
        return await server.ask_capabilities(self._address, self._api_key)

    async def wait_ready(self, patience_s: float | int = 600.0) -> None:
        """Wait until the server can make worlds: while it loads, or after it was lost."""
        await server.wait_until_ready(self._address, patience_s)

    async def connect(self) -> None:
        """Open the connection to the server.

        Raises:
            CannotConnectError: no server, or it denies the connection.
            KeyRefusedError: it wants a key, or another one.
        """
        self._socket = await server.connect_to(self._address, self._api_key)

    async def close(self) -> None:
        """Close the connection; a world that still runs ends."""
        try:
            if self._pinging is not None:
                self._pinging.cancel()
                await asyncio.gather(self._pinging, return_exceptions=True)
        finally:
            if self._socket is not None:
                await self._socket.close()

    # ------------------------------------------------------------ what a viewer says

    async def start(
        self,
        image: str | Path | bytes,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        num_frames: int | None = None,
        fps: float | int = 16,
        on_position: Callable[[int], None] | None = None,
        **fields: object,
    ) -> VideoStart:
        """Open a world; returns when it is there, after its time in the waiting line.

        Args:
            image: first picture: a path, a URL, or the bytes of a file.
            size: width and height; the server's own unless given.
            num_frames: 9 + 12k pixel frames; without it the world goes on until it is stopped.
            fps: playback rate; at 16, the model's own, a chunk plays 750 ms.
            on_position: called with each new place in the waiting line.
            fields: further fields of ``session.start``, such as ``seed`` or ``max_lead_ms``.

        Raises:
            WorldRefusedError: the server's reason why not.
        """
        length = {"unbounded": True} if num_frames is None else {"num_frames": num_frames}
        sides = {} if size is None else {"width": size[0], "height": size[1]}
        message = {
            "type": "session.start", "prompt": prompt, "queue": True, "fps": fps,
            "image_reference": {"image_url": server.image_url(image)}, **length, **sides, **fields,
        }  # fmt: skip
        return await self.open(message, on_position=on_position)

    async def open(
        self, message: Mapping[str, object], *, on_position: Callable[[int], None] | None = None
    ) -> VideoStart:
        """Open a world by a whole ``session.start``; else as :meth:`start`."""
        await self.send(message)
        if self._ping_interval_s > 0:
            self._pinging = asyncio.create_task(self._ping())
        while self.started is None:
            heard = await self._hear()
            if isinstance(heard, SessionQueued):
                self.position = heard.position
                if on_position is not None:
                    on_position(heard.position)
            elif isinstance(heard, SessionDone):
                raise WorldRefusedError("the server ended the world before it began")
        return self.started

    async def steer(
        self,
        keys: Iterable[str] | None = None,
        *,
        velocity: Pose | None = None,
        target: Pose | None = None,
        transition_chunks: int | None = None,
    ) -> str:
        """Move the camera from the next chunk on; returns the id of the event.

        Args:
            keys: held keys of ``w a s d i j k l``, none to stand still. Held until replaced.
            velocity: movement of each latent frame, held until replaced.
            target: place to go to once, relative to where the world began.

        Raises:
            ValueError: not exactly one of the three, or an unknown key.
        """
        given = [one for one in (keys, velocity, target) if one is not None]
        if len(given) != 1:
            raise ValueError("steer by exactly one of keys, velocity and target")
        if keys is not None:
            velocity = pose_of_keys(keys)
        if velocity is not None:
            camera = velocity.payload("velocity")
        else:
            assert target is not None, "one of the three"
            camera = target.payload("target")
        event = {"multi_modal_data": {"camera": camera}}
        return await self.interact(event, transition_chunks=transition_chunks)

    async def prompt(self, text: str, *, blend: int | None = None) -> str:
        """Change the prompt; returns the id of the event.

        Args:
            blend: chunks over which the new prompt fades in; 3 unless given.
        """
        return await self.interact({"prompt": text}, transition_chunks=blend)

    async def interact(
        self,
        event: Mapping[str, object],
        *,
        transition_chunks: int | None = None,
        event_id: str | None = None,
    ) -> str:
        """Send any event, as the protocol has it; returns its id."""
        self._events += 1
        interaction = {"event_id": event_id or f"event-{self._events}", "event": event}
        if transition_chunks is not None:
            interaction["transition_chunks"] = transition_chunks
        await self.send({"type": "session.interaction", "interaction": interaction})
        return str(interaction["event_id"])

    async def reset(
        self,
        *,
        prompt: str | None = None,
        image: str | Path | bytes | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin the world anew; its next chunk has index 0. What is not given stays."""
        picture = None if image is None else {"image_url": server.image_url(image)}
        given = {"prompt": prompt, "image_reference": picture, "seed": seed}
        changes = {name: value for name, value in given.items() if value is not None}
        await self.send({"type": "session.reset", **changes})

    async def stop(self) -> None:
        """End the world after the chunk that is being made; read on to get it."""
        await self.send({"type": "session.stop"})

    async def send(self, message: Mapping[str, object]) -> None:
        """Send any message that the protocol has.

        Raises:
            ConnectionLostError: the connection has ended.
        """
        try:
            await self._open_socket().send(json.dumps(message))
        except ConnectionClosed as error:
            raise self._lost(error) from error

    # ------------------------------------------------------------ what a viewer sees

    def __aiter__(self) -> "WorldClient":
        """Chunks until the world ends; may be taken up again after an ``EventRefusedError``."""
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk, as soon as all of it is here.

        Raises:
            EventRefusedError: the server refused an event; the world goes on.
            WorldRefusedError: the server ended the world, and says why.
            ConnectionLostError: the connection ended first.
        """
        while self.done is None:
            heard = await self._hear()
            if isinstance(heard, VideoChunkMetadata):
                data = await self._payload(heard)
                if heard.kind == "media":
                    return self._chunk(heard, data)
        raise StopAsyncIteration

    @property
    def video(self) -> bytes:
        """All bytes so far, in order: one fragmented MP4."""
        return b"".join(self._parts)

    def save(self, path: str | Path, *, fps: float | int | None = None) -> None:
        """Write what was received as an MP4 that every player opens.

        Args:
            fps: play at this rate; the stream's own timestamps unless given.

        Raises:
            InvalidRequestError: nothing was received, or it was not kept.
        """
        from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes  # PyAV

        Path(path).write_bytes(finalize_streaming_video_bytes(self.video, fps=fps))

    # ------------------------------------------------------------ inside

    def _open_socket(self) -> ClientConnection:
        if self._socket is None:
            raise ConnectionLostError("no connection yet: use `async with` or connect()")
        return self._socket

    async def _ping(self) -> None:
        with suppress(ConnectionLostError, WorldRefusedError):  # whoever reads gets them
            while True:
                await asyncio.sleep(self._ping_interval_s)
                await self.send({"type": "session.ping"})

    async def _hear(self) -> ServerMessage | None:
        """The next message, noted where it changes what is known; ``None`` for an unknown kind."""
        text = await self._receive()
        if isinstance(text, bytes):
            raise ProtocolError(f"{len(text)} binary bytes came without metadata")
        message = server.parsed(text)
        if isinstance(message, VideoStart):
            self.started, self.position = message, None
        elif isinstance(message, SessionDone):
            self.done = message
            if self._refusal is not None:
                raise self._refusal
        elif isinstance(message, ErrorMessage):
            self._refuse(message)
        return message

    async def _receive(self) -> str | bytes:
        try:
            return await self._open_socket().recv()
        except ConnectionClosed as error:
            raise self._lost(error) from error

    def _lost(self, error: ConnectionClosed) -> ConnectionLostError | WorldRefusedError:
        """What the end of a connection means: the last refusal, if nothing followed it."""
        if self._refusal is not None:
            return self._refusal
        return ConnectionLostError(f"the connection closed before session.done: {error}")

    def _refuse(self, message: ErrorMessage) -> None:
        """Raise what an error means, or wait where only its sequel can tell."""
        unclear = message.code == "invalid_request"
        refusal = WorldRefusedError(message.message, code=message.code)
        if server.is_of_an_event(message) or (unclear and self._has_chunk):
            raise EventRefusedError(message.message, code=message.code, event_id=message.event_id)
        if not unclear:
            raise refusal
        self._refusal = refusal

    async def _payload(self, metadata: VideoChunkMetadata) -> bytes:
        payload = await self._receive()
        if isinstance(payload, str):
            raise ProtocolError(f"metadata without its binary frame; got {payload[:100]}")
        if metadata.byte_length != len(payload):
            raise ProtocolError(f"{metadata.byte_length} bytes announced, {len(payload)} came")
        if self._keep_video:
            self._parts.append(payload)
        return payload

    def _chunk(self, metadata: VideoChunkMetadata, data: bytes) -> Chunk:
        self._has_chunk, self._refusal = True, None
        return Chunk(
            index=metadata.generation_chunk_index or 0,
            num_frames=metadata.num_frames,
            data=data,
            started=tuple(metadata.started_event_ids),
            active=tuple(metadata.active_event_ids),
            completed=tuple(metadata.completed_event_ids),
            applied=metadata.applied or {},
            frames=None if self._decoder is None else self._decoder.decode(data),
        )


def _frame_decoder() -> "FrameDecoder":
    from vllm_omni.outputs.media import FrameDecoder  # loads PyAV

    return FrameDecoder()
