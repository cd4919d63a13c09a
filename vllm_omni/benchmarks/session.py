"""One rollout over one WebSocket, as a client sees it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_omni.benchmarks.metrics import ChunkRecord, Number
from vllm_omni.benchmarks.report import SessionResult
from vllm_omni.benchmarks.workload import Workload, session_start
from vllm_omni.client import (
    CannotConnectError,
    Chunk,
    KeyRefusedError,
    ProtocolError,
    WorldClient,
    WorldError,
    WorldRefusedError,
)
from vllm_omni.client.address import socket_url

Heard = TypeVar("Heard")


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
    """WebSocket address: of a base URL (http, https, ws, wss; path appended if absent) or host."""
    return socket_url(base_url or f"http://{host}:{port}")


def served_size(endpoint: str, api_key: str | None = None) -> tuple[int, int] | None:
    """Width and height that the server at ``endpoint`` is configured for.

    ``None`` if it serves any size, does not tell, or does not answer: whatever keeps it from
    answering also keeps a session from opening, which says more.

    Raises:
        BenchmarkError: the key is refused, or the answer is no description of a server.
    """
    try:
        told = asyncio.run(WorldClient(endpoint, api_key=api_key).capabilities())
    except KeyRefusedError as error:
        raise BenchmarkError(f"{error}; give it as --api-key") from error
    except CannotConnectError:
        return None
    except ProtocolError as error:
        raise BenchmarkError(str(error)) from error
    return None if told.width is None or told.height is None else (told.width, told.height)


class _Session:
    """One rollout over one socket: reads until the end and keeps what arrived."""

    def __init__(self, client: WorldClient, workload: Workload, options: SessionOptions) -> None:
        self._client = client
        self._workload = workload
        self._options = options
        self._updates = {update.after_chunk: update for update in workload.prompt_updates}
        self._started = time.perf_counter()
        self._chunks: list[ChunkRecord] = []

    async def run(self, message: dict[str, object], index: int, run_began: Number) -> SessionResult:
        """Send the start message and read everything."""
        self._started = time.perf_counter()
        began = await self._within(self._client.open(message))
        video_start_s = time.perf_counter() - self._started
        while (chunk := await self._within(anext(self._client, None))) is not None:
            await self._record(chunk)
        self._check_complete()
        return SessionResult(
            session_index=index,
            request_id=began.request_id,
            start_offset_s=self._started - run_began,
            video_start_s=video_start_s,
            wall_seconds=self._chunks[-1].arrival_s,
            chunks=tuple(self._chunks),
            video=self._client.video,
        )

    async def _within(self, call: Awaitable[Heard]) -> Heard:
        options = self._options
        limit_s = options.chunk_timeout_s if self._chunks else options.first_chunk_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise BenchmarkError(
                f"no chunk {len(self._chunks)} within {limit_s:g} s; see --first-chunk-timeout "
                "and --chunk-timeout"
            ) from None

    async def _record(self, chunk: Chunk) -> None:
        arrival_s = time.perf_counter() - self._started
        expected = len(self._chunks)
        if chunk.index != expected:
            raise BenchmarkError(
                f"chunk indices are not contiguous: {chunk.index} after {expected - 1}"
            )
        if expected >= self._workload.num_chunks:
            raise BenchmarkError(f"more chunks than the {self._workload.num_chunks} asked for")
        previous = self._chunks[-1].arrival_s if self._chunks else None
        record = ChunkRecord(
            index=expected,
            arrival_s=arrival_s,
            inter_arrival_ms=None if previous is None else (arrival_s - previous) * 1000.0,
            byte_length=len(chunk.data),
            num_frames=chunk.num_frames,
        )
        self._chunks.append(record)
        if update := self._updates.get(expected):
            await self._client.interact(
                {"prompt": update.prompt},
                transition_chunks=update.transition_chunks,
                event_id=f"chunk-{expected}",
            )
        if self._options.on_chunk is not None:
            self._options.on_chunk(record)

    def _check_complete(self) -> None:
        done, count = self._client.done, len(self._chunks)
        if done is not None and done.stopped:
            raise BenchmarkError(f"the server stopped the session after {count} chunks")
        if not self._chunks:
            raise BenchmarkError("the session ended without a chunk")
        if count < self._workload.num_chunks:
            raise BenchmarkError(
                f"the session ended after {count} of {self._workload.num_chunks} chunks"
            )


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
    client = WorldClient(
        endpoint,
        api_key=options.api_key,
        keep_video=options.keep_video,
        ping_interval_s=options.ping_interval_s,
    )
    message = session_start(workload, model=model)
    try:
        async with client:
            session = _Session(client, workload, options)
            return await session.run(message, session_index, run_began or time.perf_counter())
    except WorldRefusedError as error:
        raise BenchmarkError(
            f"the server reports: {error} (asked for {workload.num_chunks} chunks, "
            f"{workload.num_frames} frames)"
        ) from error
    except WorldError as error:
        raise BenchmarkError(str(error)) from error
