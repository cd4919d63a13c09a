"""What all requests of one server share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_omni.config.deploy import MAX_SEQUENCE_LENGTH
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES, FIRST_CHUNK_PIXEL_FRAMES
from vllm_omni.diffusion.messages import SessionRequest
from vllm_omni.diffusion.models.lingbot_world.request import NATIVE_FPS
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.interactions import MODALITIES
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.entrypoints.server.protocol import Capabilities, StartParams
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")


def _media_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="media")


@dataclass(frozen=True, slots=True)
class ServerState:
    """The engine, the configuration, and the threads for work that an event loop must not do."""

    client: EngineClient
    config: ServerConfig
    images: ImageSource = field(default_factory=ImageSource)
    threads: ThreadPoolExecutor = field(default_factory=_media_threads)
    sockets: set[asyncio.Task[None]] = field(default_factory=set)

    async def in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run picture decoding or video encoding off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    async def session_request(
        self, params: StartParams, request_id: str, *, streamed: bool
    ) -> SessionRequest:
        """Fetch the picture and validate everything, within the limits of this server.

        Args:
            streamed: whether the client could ask for an endless world.

        Raises:
            InvalidRequestError: naming the field, what was got and what is needed.
        """
        image = await self.images.load(params.image_url)
        sampling = OmniDiffusionSamplingParams(
            height=params.height,
            width=params.width,
            # 1 is what the deployment's default fills in.
            num_frames=None if params.unbounded else params.num_frames or 1,
            seed=params.seed,
            fps=params.fps,
            output_type="pil",
            extra_args=dict(params.extra_args),
        )
        prompt = {"prompt": params.prompt, "multi_modal_data": {"image": image}}
        unbounded = params.unbounded if streamed else None
        return await self.in_thread(
            lambda: self._parse(request_id, prompt, sampling, unbounded=unbounded)
        )

    def _parse(
        self,
        request_id: str,
        prompt: Mapping[str, object],
        sampling: OmniDiffusionSamplingParams,
        *,
        unbounded: bool | None,
    ) -> SessionRequest:
        request = self.client.parse(prompt, sampling, unbounded=unbounded)
        limit = self.config.max_pixels
        if request.height * request.width > limit:
            raise InvalidRequestError(
                f"{request.width}x{request.height} has {request.width * request.height} pixels, "
                f"at most {limit} are served (--max-generated-image-size)",
                field="size",
            )
        if self.config.log_requests:
            logger.info(
                "request %s: %dx%d, %s chunks, %g fps, seed %d, %s, prompt %.200r",
                *(request_id, request.width, request.height, request.num_chunks or "endless"),
                *(request.fps, request.seed, type(request.camera).__name__, request.prompt),
            )
        return request

    def capabilities(self) -> Capabilities:
        """What this server can do."""
        geometry = self.client.deployment.config.geometry
        return Capabilities(
            height=None if geometry is None else geometry.height,
            width=None if geometry is None else geometry.width,
            frames_first_chunk=FIRST_CHUNK_PIXEL_FRAMES,
            frames_per_chunk=CHUNK_PIXEL_FRAMES,
            native_fps=NATIVE_FPS,
            max_prompt_tokens=MAX_SEQUENCE_LENGTH,
            modalities=list(MODALITIES),
            max_sessions=self.client.engine.max_sessions,
        )
