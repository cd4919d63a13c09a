"""One rollout of the engine as one finished MP4."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni.diffusion.geometry import pixel_frames_of
from vllm_omni.diffusion.messages import EncoderOptions, SessionRequest
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.engine.session import ChunkReady, Ended, EndReason, Opened, StopCause
from vllm_omni.entrypoints.engine_client import EventQueue, stage_seconds
from vllm_omni.entrypoints.server.http_errors import HttpRefusalError
from vllm_omni.entrypoints.server.start import SessionStart
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.tracing import SessionTrace
from vllm_omni.errors import SessionClosedError
from vllm_omni.outputs.media import ChunkEncoder
from vllm_omni.system_errors import reason

MAX_VIDEO_BYTES = 2**30
"""Largest video that is collected in memory."""

_PIXELS_PER_BYTE = 8
"""A usual video; noise takes more."""

Progress = Callable[[float], None]
"""Told the share of the rollout that is made, from 0, once when it begins and after each chunk."""


@dataclass(frozen=True, slots=True)
class FinishedVideo:
    """A video with what it took to make.

    Attributes:
        inference_s: from the session's place on the workers to its last chunk.
        stage_durations: seconds by part of a chunk, summed over the rollout.
        peak_bytes: peak memory of the rank that used most.
    """

    mp4: bytes
    seed: int
    num_frames: int
    fps: float
    inference_s: float
    stage_durations: dict[str, float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class VideoRequest:
    """A validated request for a video.

    Attributes:
        request_id: for logs and headers; the id of a job.
        quality: as the client named it; no effect.
    """

    request_id: str
    session: SessionRequest
    encoder: EncoderOptions
    quality: str | None

    @property
    def num_frames(self) -> int:
        """Number of pixel frames of the video."""
        assert self.session.num_chunks is not None, "a bounded request has a length"
        return pixel_frames_of(self.session.num_chunks)

    @property
    def expected_bytes(self) -> int:
        """About how large the file will be."""
        pixels = self.session.width * self.session.height * self.num_frames
        return pixels // _PIXELS_PER_BYTE

    @property
    def duration_s(self) -> float:
        """Playing time of the video in seconds."""
        return self.num_frames / self.session.fps


async def prepare(state: ServerState, start: SessionStart, request_id: str) -> VideoRequest:
    """Check everything, then fetch the picture; nothing is opened."""
    request = await state.in_thread(lambda: state.check(start, streamed=False))
    session = await state.session_request(start, request, request_id)
    return VideoRequest(request_id, session, start.encoder_options(), start.quality)


class VideoRollout:
    """A session whose chunks are encoded as they come and joined at the end.

    It is open once made; :meth:`collect` must be awaited or its task cancelled, either of which
    ends the session. Made and used on the event loop.

    Raises:
        ServerFullError: if the waiting line is full.
        OutOfKVMemoryError: if its window can never fit.
        SessionClosedError: if the server is shutting down.
    """

    def __init__(self, state: ServerState, request: VideoRequest) -> None:
        self.request = request
        self._state = state
        self._events = EventQueue()
        self._session_id = state.client.engine.open(
            request.session, self._events.put, request_id=request.request_id
        )

    def abandon(self) -> None:
        """End the session at its next chunk boundary; no error if it has ended."""
        self._state.client.engine.stop(self._session_id)

    async def collect(self, progress: Progress = lambda _: None) -> FinishedVideo:
        """Wait for the whole video. Leaving early ends the session.

        Raises:
            OmniError: what ended the session.
        """
        session = self.request.session
        try:
            encoder = await self._state.encoder(session, self.request.encoder)
            try:
                with self._state.traces.session(self._session_id) as trace:
                    return await self._collect(encoder, progress, trace)
            finally:
                encoder.close()
        except Exception:
            # No effect on a session that has ended by itself; else something broke on this side.
            self._state.client.engine.stop(self._session_id, StopCause.FAULT)
            raise
        finally:
            self.abandon()

    async def _collect(
        self, encoder: ChunkEncoder, progress: Progress, trace: SessionTrace
    ) -> FinishedVideo:
        session = self.request.session
        fragments, durations = bytearray(), dict[str, float]()
        started_s = last_s = time.monotonic()
        while not isinstance(event := await self._events.get(), Ended):
            trace.took(event)
            if isinstance(event, Opened):
                started_s = event.at_s
                progress(0.0)
            if isinstance(event, ChunkReady):
                last_s = event.result.ready_s
                fragments += await self._encode(encoder, event)
                trace.part("encode", time.monotonic())
                _check_size(len(fragments))
                for name, seconds in stage_seconds(event.result.timings).items():
                    durations[name] = durations.get(name, 0.0) + seconds
                progress((event.result.chunk_index + 1) / (session.num_chunks or 1))
        if event.error is not None:
            raise event.error
        if event.reason is not EndReason.FINISHED:
            raise SessionClosedError("the session was stopped before its end")
        fragments += await self._state.in_thread(encoder.finish)
        try:
            mp4 = await self._state.in_thread(finalize_streaming_video_bytes, bytes(fragments))
        except OSError as error:
            raise HttpRefusalError(
                503,
                f"the finished video of {len(fragments)} bytes is lost: the server's folder for "
                f"temporary files (TMPDIR) cannot hold it: {reason(error)}",
            ) from error
        return FinishedVideo(
            mp4,
            seed=session.seed,
            num_frames=self.request.num_frames,
            fps=session.fps,
            inference_s=last_s - started_s,
            stage_durations=durations,
            peak_bytes=event.peak_bytes,
        )

    async def _encode(self, encoder: ChunkEncoder, event: ChunkReady) -> bytes:
        # The engine pauses the session while two chunks wait here.
        payload = await self._state.in_thread(encoder.encode, event.result.data)
        self._state.client.engine.delivered(self._session_id)
        return payload


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_VIDEO_BYTES:
        raise HttpRefusalError(
            400,
            f"the video has more than {MAX_VIDEO_BYTES} bytes; ask for fewer frames or for a "
            "stream over /v1/realtime/video",
            field="num_frames",
        )
