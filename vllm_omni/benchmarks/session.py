"""One rollout over one WebSocket, as a client sees it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from vllm_omni.benchmarks.metrics import ChunkRecord, Number
from vllm_omni.benchmarks.report import SessionResult
from vllm_omni.benchmarks.workload import (
    PromptUpdate,
    Workload,
    prompt_interaction,
    session_start,
)

ENDPOINT_PATH = "/v1/realtime/video"
CAPABILITIES_PATH = "/v1/realtime/capabilities"
_CAPABILITIES_TIMEOUT_S = 10.0


class BenchmarkError(RuntimeError):
    """A session that did not deliver what was asked for: it has no figures."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Limits and side tasks of a session.

    Attributes:
        ping_interval_s: 0 turns pings off.
        api_key: sent as bearer token.
        keep_video: whether the result holds the video, which may be large.
    """

    first_chunk_timeout_s: Number = 900.0
    chunk_timeout_s: Number = 300.0
    ping_interval_s: Number = 20.0
    on_chunk: Callable[[ChunkRecord], None] | None = None
    api_key: str | None = None
    keep_video: bool = True


def endpoint_url(base_url: str | None, host: str = "127.0.0.1", port: int = 8000) -> str:
    """WebSocket address: of a base URL (http, https, ws, wss; path appended if absent) or host.

    Raises:
        ValueError: the base URL has another scheme.
    """
    if base_url is None:
        return f"ws://{host}:{port}{ENDPOINT_PATH}"
    parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes:
        raise ValueError(f"--base-url must be http, https, ws or wss, got {base_url!r}")
    path = parts.path.rstrip("/")
    if not path.endswith(ENDPOINT_PATH):
        path += ENDPOINT_PATH
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, parts.query, ""))


def bearer(api_key: str | None) -> dict[str, str]:
    """Headers that carry a key, none without one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def served_size(endpoint: str, api_key: str | None = None) -> tuple[int, int] | None:
    """Width and height that the server at ``endpoint`` is configured for.

    ``None`` if it serves any size, does not tell, or does not answer: whatever keeps it from
    answering also keeps a session from opening, which says more.

    Raises:
        BenchmarkError: the key is refused, or the answer is no description of a server.
    """
    url = endpoint.replace("ws", "http", 1).replace(ENDPOINT_PATH, CAPABILITIES_PATH)
    try:
        answer = httpx.get(url, headers=bearer(api_key), timeout=_CAPABILITIES_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL):
        return None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise BenchmarkError(f"{url} needs a valid API key; give it as --api-key")
    if answer.status_code != httpx.codes.OK:
        return None
    try:
        told = answer.json()
        sides = told["width"], told["height"]
        return None if None in sides else (int(sides[0]), int(sides[1]))
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{url} does not describe a server: {answer.text[:100]}") from error


class _Session:
    """One rollout over one socket: reads until the end and keeps what arrived."""

    def __init__(
        self, socket: ClientConnection, workload: Workload, options: SessionOptions
    ) -> None:
        self._socket = socket
        self._workload = workload
        self._options = options
        self._updates = {update.after_chunk: update for update in workload.prompt_updates}
        self._started = time.perf_counter()
        self._video_start_s: float | None = None
        self._request_id = ""
        self._chunks: list[ChunkRecord] = []
        self._payloads: list[bytes] = []

    async def run(self, start_message: str, index: int, run_began: Number) -> SessionResult:
        """Send the start message and read everything.

        Raises:
            BenchmarkError: see the module's exit codes.
        """
        await self._socket.send(start_message)
        self._started = time.perf_counter()
        async with self._pings():
            while await self._next_payload():
                pass
        self._check_complete()
        return SessionResult(
            session_index=index,
            request_id=self._request_id,
            start_offset_s=self._started - run_began,
            video_start_s=self._video_start_s or 0.0,
            wall_seconds=self._chunks[-1].arrival_s,
            chunks=tuple(self._chunks),
            video=b"".join(self._payloads),
        )

    async def _next_payload(self) -> bool:
        """Read up to and including one media payload; False when the session is done."""
        options = self._options
        limit_s = options.chunk_timeout_s if self._chunks else options.first_chunk_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._read_until_media()
        except TimeoutError:
            raise BenchmarkError(
                f"no chunk {len(self._chunks)} within {limit_s:g} s; see --first-chunk-timeout "
                "and --chunk-timeout"
            ) from None

    async def _read_until_media(self) -> bool:
        while True:
            message = self._control(await self._socket.recv())
            match message.get("type"):
                case "video.start":
                    self._video_start_s = time.perf_counter() - self._started
                    self._request_id = str(message.get("request_id", ""))
                case "video.chunk_metadata":
                    payload = await self._payload(message)
                    if message.get("kind", "media") == "media":
                        await self._record(message, len(payload))
                        return True
                case "session.done":
                    self._check_done(message)
                    return False
                case "error":
                    raise BenchmarkError(
                        f"the server reports: {message.get('message')} (asked for "
                        f"{self._workload.num_chunks} chunks, {self._workload.num_frames} frames)"
                    )

    def _control(self, received: str | bytes) -> dict[str, object]:
        if isinstance(received, bytes):
            raise BenchmarkError(f"{len(received)} binary bytes came without metadata")
        try:
            message = json.loads(received)
        except ValueError as error:
            raise BenchmarkError(f"the server sent no JSON: {error}") from error
        if not isinstance(message, dict):
            raise BenchmarkError(f"the server sent no object: {received[:100]}")
        return message

    async def _payload(self, metadata: dict[str, object]) -> bytes:
        payload = await self._socket.recv()
        if isinstance(payload, str):
            raise BenchmarkError(f"metadata without its binary frame; got {payload[:100]}")
        announced = metadata.get("byte_length")
        if announced != len(payload):
            raise BenchmarkError(f"metadata announced {announced} bytes, {len(payload)} came")
        if self._options.keep_video:
            self._payloads.append(payload)
        return payload

    async def _record(self, metadata: dict[str, object], byte_length: int) -> None:
        arrival_s = time.perf_counter() - self._started
        expected, index = len(self._chunks), metadata.get("generation_chunk_index")
        if index != expected:
            raise BenchmarkError(f"chunk indices are not contiguous: {index} after {expected - 1}")
        if expected >= self._workload.num_chunks:
            raise BenchmarkError(f"more chunks than the {self._workload.num_chunks} asked for")
        previous = self._chunks[-1].arrival_s if self._chunks else None
        record = ChunkRecord(
            index=expected,
            arrival_s=arrival_s,
            inter_arrival_ms=None if previous is None else (arrival_s - previous) * 1000.0,
            byte_length=byte_length,
            num_frames=int(str(metadata.get("num_frames", 0))),
        )
        self._chunks.append(record)
        if update := self._updates.get(expected):
            await self._send_update(update)
        if self._options.on_chunk is not None:
            self._options.on_chunk(record)

    async def _send_update(self, update: PromptUpdate) -> None:
        await self._socket.send(json.dumps(prompt_interaction(update)))

    def _check_done(self, message: dict[str, object]) -> None:
        if message.get("stopped"):
            raise BenchmarkError(f"the server stopped the session after {len(self._chunks)} chunks")

    def _check_complete(self) -> None:
        if not self._chunks:
            raise BenchmarkError("the session ended without a chunk")
        if len(self._chunks) < self._workload.num_chunks:
            raise BenchmarkError(
                f"the session ended after {len(self._chunks)} of {self._workload.num_chunks} chunks"
            )

    @asynccontextmanager
    async def _pings(self) -> AsyncIterator[None]:
        interval_s = self._options.ping_interval_s
        task = asyncio.create_task(self._ping_forever(interval_s)) if interval_s > 0 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, ConnectionClosed):
                    await task

    async def _ping_forever(self, interval_s: Number) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self._socket.send('{"type":"session.ping"}')


async def run_session(
    endpoint: str,
    workload: Workload,
    options: SessionOptions,
    *,
    model: str | None = None,
    session_index: int = 0,
    run_began: Number | None = None,
) -> SessionResult:
    """Open a socket, run one rollout and return what arrived.

    Raises:
        BenchmarkError: the session failed, stopped early, or delivered something else.
    """
    message = json.dumps(session_start(workload, model=model))
    try:
        # Answers to protocol pings would wait behind a full receive buffer: session.ping is used.
        headers = bearer(options.api_key)
        async with connect(
            endpoint, max_size=None, ping_interval=None, additional_headers=headers
        ) as socket:
            session = _Session(socket, workload, options)
            return await session.run(message, session_index, run_began or time.perf_counter())
    except ConnectionClosed as error:
        raise BenchmarkError(f"the connection closed before session.done: {error}") from error
    except (OSError, InvalidHandshake, InvalidURI) as error:
        raise BenchmarkError(f"cannot connect to {endpoint}: {error}") from error
