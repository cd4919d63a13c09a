"""One socket, one world: from ``session.start`` to ``session.done``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
from pydantic import JsonValue

from vllm_omni.diffusion.geometry import chunk_pixel_frames
from vllm_omni.diffusion.messages import SessionRequest
from vllm_omni.engine.session import (
    ChunkReady,
    Ended,
    EndReason,
    Opened,
    SessionEvent,
    SessionOptions,
    StopCause,
    Waiting,
    WasReset,
)
from vllm_omni.entrypoints.engine_client import EventQueue
from vllm_omni.entrypoints.server.channel import ClientGoneError, ClientTooSlowError, SocketChannel
from vllm_omni.entrypoints.server.http_errors import count_refusal, refusals_counted
from vllm_omni.entrypoints.server.protocol import (
    ControlMessage,
    SessionDone,
    SessionInteraction,
    SessionPing,
    SessionPong,
    SessionQueued,
    SessionReset,
    SessionResetDone,
    SessionStart,
    SessionStop,
    VideoChunkMetadata,
    VideoStart,
    parse_control,
    parse_start,
)
from vllm_omni.entrypoints.server.request_ids import name_request
from vllm_omni.entrypoints.server.state import LiveVideo, ServerState
from vllm_omni.entrypoints.server.steering import Steering
from vllm_omni.entrypoints.server.tracing import NO_TRACE
from vllm_omni.errors import InvalidRequestError, OmniError, SessionClosedError, SessionFailedError
from vllm_omni.inputs.request import RolloutRequest

SESSION_PREFIX = "video_stream-"
_MAX_PREPARING = 4
"""Resets of one session that may wait for their pictures."""
_TAKEN = np.empty(0, np.uint8)
"""In place of pixels that were encoded."""


@dataclass(frozen=True, slots=True)
class Timers:
    """Limits of one socket, in seconds.

    Attributes:
        start: until the first message.
        stall: without any progress.
        poll: between two looks at the stall timer.
    """

    start: float = 10.0
    stall: float = 60.0
    poll: float = 1.0


@dataclass(frozen=True, slots=True)
class _Ready:
    """An event, and the video that stands for the pixels of its chunk since ``at_s``."""

    event: SessionEvent
    video: bytes = b""
    at_s: float = 0.0


class RealtimeVideoSession:
    """Runs the protocol of one accepted socket.

    Four tasks, of which the first to end ends the session: one makes and sends chunks, one reads
    the client, one prepares resets, one watches for stalls.
    """

    def __init__(self, channel: SocketChannel, state: ServerState, timers: Timers) -> None:
        self._channel = channel
        self._state = state
        self._timers = timers
        self._engine = state.client.engine
        self._events = EventQueue()
        self._resets: asyncio.Queue[SessionReset] = asyncio.Queue(_MAX_PREPARING)
        self._request_id = name_request(SESSION_PREFIX)
        self._steering = Steering(channel, state, self._request_id)
        self._config: dict[str, JsonValue] = {}
        self._session_id: str | None = None
        self._trace = NO_TRACE
        self._position: int | None = None
        self._stopped = False
        self._binary_frames = 0
        self._started_s = time.monotonic()
        self._progress_s = self._started_s

    async def run(self) -> None:
        """Serve the socket to its end. Frees the session on every way out."""
        try:
            await self._run()
        except ClientGoneError:
            pass
        except OmniError as error:
            await self._channel.send_last(error, request_id=self._request_id)
        except Exception:
            # Raised again for the log: a client learns that something broke, never what.
            fault = SessionFailedError("the session failed inside the server; its log says why")
            await self._channel.send_last(fault, request_id=self._request_id)
            raise
        finally:
            await self._channel.close()

    async def _run(self) -> None:
        with refusals_counted(self._engine.metrics, self._request_id):
            start, request = await self._receive_start()
        video = asyncio.create_task(self._make_video(start, request), name="video")
        reader = asyncio.create_task(self._read_client(), name="reader")
        resets = asyncio.create_task(self._prepare_resets(), name="resets")
        watch = asyncio.create_task(self._watch_for_stall(), name="stall watch")
        tasks = (video, reader, resets, watch)
        fault: BaseException | None = SessionClosedError("the server cut the connection off")
        stalled = False
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            fault = next((e for t in tasks if t in done and (e := t.exception())), None)
            stalled = fault is None and done == {watch}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._account(fault, stalled=stalled)
        if fault is not None:
            raise fault
        if video not in done:
            await self._end_early(stalled=stalled)

    def _account(self, fault: BaseException | None, *, stalled: bool) -> None:
        """Stop the session and count its end; the engine counts sessions that it knows."""
        cause = StopCause.STALLED if stalled else StopCause.ASKED
        if isinstance(fault, ClientGoneError | ClientTooSlowError):
            cause = StopCause.DISCONNECTED
        elif fault is not None:
            cause = StopCause.FAULT
        if self._session_id is not None:
            self._engine.stop(self._session_id, cause)
        elif cause is StopCause.FAULT and isinstance(fault, OmniError):
            count_refusal(self._engine.metrics, self._request_id, fault)
        else:
            self._engine.metrics.stopped(cause)

    async def _end_early(self, *, stalled: bool) -> None:
        """Tell the client that the session ends before its video began."""
        if stalled:
            await self._channel.send_error(
                SessionClosedError(f"Stall timeout: no progress for {self._timers.stall:.0f} s"),
                request_id=self._request_id,
            )
        await self._send_done(stopped=True)

    # ------------------------------------------------------------ video

    async def _make_video(self, start: SessionStart, request: RolloutRequest) -> None:
        self._config = start.config(request)
        if not start.queue:
            await self._send_start()
        try:
            await self._stream(start, request)
        except ClientTooSlowError:
            raise
        except OmniError:
            if not self._stopped:
                raise
            await self._send_done(stopped=True)

    async def _stream(self, start: SessionStart, request: RolloutRequest) -> None:
        session = await self._state.session_request(start, request, self._request_id)
        session, encoder = await self._state.live_video(session, start.encoder_options())
        try:
            options = SessionOptions(max_lead_ms=start.max_lead_ms, live=True)
            self._session_id = self._engine.open(
                session, self._events.put, options, request_id=self._request_id
            )
            with self._state.traces.session(self._session_id) as self._trace:
                await self._steering.begin(self._session_id)
                await self._handle_events(start, encoder)
        finally:
            encoder.close()

    async def _handle_events(self, start: SessionStart, encoder: LiveVideo) -> None:
        """Tell the client of one event after another; the next one is made ready meanwhile.

        So no pixels wait for a client that does not read, which are ten times their video.
        """
        upcoming = asyncio.create_task(self._next_event(encoder))
        try:
            while not isinstance(event := (ready := await upcoming).event, Ended):
                upcoming = asyncio.create_task(self._next_event(encoder))
                self._progressed()
                await self._handle(ready, start)
            await self._finish(event, encoder)
        finally:
            upcoming.cancel()

    async def _next_event(self, encoder: LiveVideo) -> _Ready:
        event = await self._events.get()
        if not isinstance(event, ChunkReady):
            return _Ready(event)
        payload = await self._state.in_thread(encoder.encode, event.result.data)
        event = replace(event, result=replace(event.result, data=_TAKEN))
        return _Ready(event, payload, time.monotonic())

    async def _handle(self, ready: _Ready, start: SessionStart) -> None:
        self._trace.took(ready.event)
        match ready.event:
            case Waiting(position) if start.queue and position != self._position:
                self._position = position
                await self._channel.send(
                    SessionQueued(request_id=self._request_id, position=position)
                )
            case Opened() if start.queue:
                await self._send_start()
            case WasReset():
                await self._channel.send(SessionResetDone(request_id=self._request_id))
            case ChunkReady(result, receipt):
                self._trace.part("encode", ready.at_s)
                metadata = VideoChunkMetadata(
                    request_id=self._request_id,
                    num_frames=chunk_pixel_frames(result.chunk_index),
                    byte_length=len(ready.video),
                    generation_chunk_index=result.chunk_index,
                    started_event_ids=list(receipt.started),
                    active_event_ids=list(receipt.active),
                    completed_event_ids=list(receipt.completed),
                    transport_chunk_index=self._binary_frames,
                    server_ready_ms=(result.ready_s - self._started_s) * 1000.0,
                    applied=dict(receipt.applied),
                )
                await self._channel.send_chunk(metadata, ready.video)
                self._trace.part("deliver", time.monotonic())
                self._binary_frames += 1
                self._progressed()
                if self._session_id is not None:
                    self._engine.delivered(self._session_id)

    async def _finish(self, ended: Ended, encoder: LiveVideo) -> None:
        if ended.reason is EndReason.FAILED and ended.error is not None and not self._stopped:
            raise ended.error
        trailer = await self._state.in_thread(encoder.finish)
        if trailer:
            metadata = VideoChunkMetadata(
                request_id=self._request_id,
                kind="trailer",
                num_frames=0,
                byte_length=len(trailer),
                generation_chunk_index=None,
                transport_chunk_index=self._binary_frames,
                server_ready_ms=None,
                applied=None,
            )
            await self._channel.send_chunk(metadata, trailer)
            self._binary_frames += 1
        await self._send_done(stopped=ended.reason is not EndReason.FINISHED)

    async def _send_done(self, *, stopped: bool) -> None:
        await self._channel.send(
            SessionDone(request_id=self._request_id, chunks=self._binary_frames, stopped=stopped)
        )

    async def _send_start(self) -> None:
        capabilities = self._state.capabilities()

        def text() -> str:
            return VideoStart(
                request_id=self._request_id, config=self._config, capabilities=capabilities
            ).to_text()

        # It repeats the picture: up to four million characters.
        await self._channel.send_text("video.start", await self._state.in_thread(text))
        self._started_s = time.monotonic()
        self._progressed()

    # ------------------------------------------------------------ client

    async def _receive_start(self) -> tuple[SessionStart, RolloutRequest]:
        try:
            async with asyncio.timeout(self._timers.start):
                text = await self._channel.receive()
        except TimeoutError:
            raise InvalidRequestError(
                f"no session.start within {self._timers.start:.0f} s"
            ) from None
        start = await self._state.in_thread(parse_start, text)
        request = await self._state.in_thread(lambda: self._state.check(start, streamed=True))
        self._channel.state.received(start.type)
        return start, request

    async def _read_client(self) -> None:
        """Obey the client until it stops a session that has made nothing yet."""
        while True:
            try:
                text = await self._channel.receive()
                message = parse_control(text)
                self._channel.state.received(message.type)
                if isinstance(message, SessionStop) and self._stop_now():
                    return
                await self._obey(message)
            except InvalidRequestError as error:
                await self._channel.send_error(error, request_id=self._request_id)

    async def _obey(self, message: ControlMessage) -> None:
        match message:
            case SessionPing():
                self._progressed()
                await self._channel.send(SessionPong())
            case SessionInteraction():
                await self._steering.take(message)
            case SessionReset():
                self._require_session()
                if self._resets.full():
                    raise InvalidRequestError(f"{_MAX_PREPARING} resets are being prepared already")
                self._resets.put_nowait(message)

    def _stop_now(self) -> bool:
        """Stop the session; tell whether there is no chunk to wait for."""
        self._stopped = True
        if self._session_id is None:
            return True
        waiting = self._engine.is_waiting(self._session_id)
        self._engine.stop(self._session_id, StopCause.ASKED)
        return waiting

    async def _prepare_resets(self) -> None:
        """Prepare resets in turn. Pictures may take a minute, so the client is read meanwhile."""
        while True:
            message = await self._resets.get()
            try:
                await self._reset(message)
            except ClientTooSlowError:
                raise
            except OmniError as error:
                await self._channel.send_error(error, request_id=self._request_id)

    async def _reset(self, message: SessionReset) -> None:
        image = None
        if message.image_reference is not None:
            image = await self._state.picture(message.image_reference.image_url)
        prompt = None
        if message.prompt is not None:
            prompt = await self._state.in_thread(self._state.client.tokenize, message.prompt)

        def change(request: SessionRequest) -> SessionRequest:
            return replace(
                request,
                prompt=request.prompt if prompt is None else prompt,
                image=request.image if image is None else image,
                seed=request.seed if message.seed is None else message.seed,
            )

        self._engine.reset(self._require_session(), change)

    def _require_session(self) -> str:
        if self._session_id is None:
            raise InvalidRequestError("the session is being prepared; try again in a moment")
        return self._session_id

    # ------------------------------------------------------------ stalls

    def _progressed(self) -> None:
        self._progress_s = time.monotonic()

    async def _watch_for_stall(self) -> None:
        """Returns when nothing has happened for too long."""
        while time.monotonic() - self._progress_s <= self._timers.stall:
            await asyncio.sleep(self._timers.poll)
            in_line = self._session_id is not None and self._engine.is_waiting(self._session_id)
            if in_line or self._channel.is_sending:
                self._progressed()
