"""What all requests of one server share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from jaxtyping import UInt8

from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES, FIRST_CHUNK_PIXEL_FRAMES, chunk_play_ms
from vllm_omni.diffusion.messages import EncoderOptions, SessionRequest, SourceImage, VideoSettings
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.entrypoints.server.protocol import Capabilities
from vllm_omni.entrypoints.server.start import NAMES, SessionStart
from vllm_omni.entrypoints.server.tracing import NO_TRACES, Traces
from vllm_omni.inputs.interaction import ControlEvent, Interaction, control_event
from vllm_omni.inputs.request import Door, RolloutRequest
from vllm_omni.logger import get_logger
from vllm_omni.outputs.media import ChunkEncoder

logger = get_logger(__name__)

Result = TypeVar("Result")


class WorkerVideo:
    """Stands for the encoder of a world whose chunks come as video."""

    def encode(self, video: UInt8[np.ndarray, " bytes"]) -> bytes:
        """Return the video of a chunk as it came; raise RuntimeError if the worker had none."""
        if not len(video):
            raise RuntimeError("the encoder of a worker failed; the worker's log says why")
        return video.tobytes()

    def finish(self) -> bytes:
        """Return what the encoder still holds, which is nothing after whole chunks."""
        return b""

    def close(self) -> None:
        """Do nothing: the worker frees its encoder with the session."""


LiveVideo = ChunkEncoder | WorkerVideo
"""What makes bytes for the client of what the engine hands out."""


def _media_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="media")


@dataclass(frozen=True, slots=True)
class ServerState:
    """The engine, the configuration, and the threads for work that an event loop must not do."""

    client: EngineClient
    config: ServerConfig
    images: ImageSource = field(default_factory=ImageSource)
    traces: Traces = NO_TRACES
    threads: ThreadPoolExecutor = field(default_factory=_media_threads)
    sockets: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def door(self) -> Door:
        """The way in for requests."""
        return self.client.door(NAMES, max_pixels=self.config.max_pixels)

    async def picture(self, url: str) -> SourceImage:
        """Fetch and decode a picture."""
        return await self.in_thread(self.door.picture, await self.images.load(url))

    async def in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run picture decoding or video encoding off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    def check(self, start: SessionStart, *, streamed: bool) -> RolloutRequest:
        """Check a start message as far as that needs no picture and no file.

        Args:
            streamed: whether the client could ask for an endless world.
        """
        start.check_model(self.config.served_model_names)
        fields = start.rollout_fields(self.door.policy.limits.native_fps) | {
            "unbounded": start.unbounded if streamed else None
        }
        request = self.door.check(fields)
        self.images.check(start.image_url)
        return request

    async def session_request(
        self, start: SessionStart, request: RolloutRequest, request_id: str
    ) -> SessionRequest:
        """Fetch and decode the picture of a checked request, and read its camera."""
        picture = await self.picture(start.image_url)
        session = await self.in_thread(self.door.complete, request, picture)
        if self.config.log_requests:
            logger.info(
                "request %s: %dx%d, %s chunks that play %.0f ms each at %g fps, seed %d, %s, "
                "prompt %.200r",
                *(request_id, session.width, session.height, session.num_chunks or "endless"),
                *(chunk_play_ms(session.fps), session.fps, session.seed),
                *(type(session.camera).__name__, session.prompt.text),
            )
        return session

    async def control_event(self, interaction: Interaction) -> ControlEvent:
        """Read what an interaction means.

        Raises:
            InteractionError: for a modality or a payload that the model does not take.
        """
        arguments = (interaction, self.client.model.modalities, self.client.tokenize)
        if interaction.event.prompt is None:
            return control_event(*arguments)
        return await self.in_thread(control_event, *arguments)

    async def encoder(self, session: SessionRequest, options: EncoderOptions) -> ChunkEncoder:
        """Begin the video of a session."""
        size, codec = (session.width, session.height), self.config.video_encoder
        return await self.in_thread(ChunkEncoder, *size, session.fps, options, codec)

    async def live_video(
        self, session: SessionRequest, options: EncoderOptions
    ) -> tuple[SessionRequest, LiveVideo]:
        """Begin the video of a live world, on its worker where that encodes; what to open then."""
        if self.client.deployment.config.encode_on == "api":
            return session, await self.encoder(session, options)
        video = VideoSettings(options, self.config.video_encoder)
        return replace(session, video=video), WorkerVideo()

    def capabilities(self) -> Capabilities:
        """What this server can do."""
        policy = self.door.policy
        geometry, limits = policy.geometry, policy.limits
        return Capabilities(
            height=None if geometry is None else geometry.height,
            width=None if geometry is None else geometry.width,
            frames_first_chunk=FIRST_CHUNK_PIXEL_FRAMES,
            frames_per_chunk=CHUNK_PIXEL_FRAMES,
            native_fps=limits.native_fps,
            max_prompt_tokens=limits.max_sequence_length,
            modalities=list(self.client.model.modalities),
            max_sessions=self.client.engine.max_sessions,
        )
