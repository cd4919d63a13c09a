"""What all requests of one server share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES, FIRST_CHUNK_PIXEL_FRAMES
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.interactions import MODALITIES
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.entrypoints.server.protocol import Capabilities

NATIVE_FPS = 16.0
MAX_PROMPT_TOKENS = 512

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

    def capabilities(self) -> Capabilities:
        """What this server can do."""
        geometry = self.client.deployment.config.geometry
        return Capabilities(
            height=None if geometry is None else geometry.height,
            width=None if geometry is None else geometry.width,
            frames_first_chunk=FIRST_CHUNK_PIXEL_FRAMES,
            frames_per_chunk=CHUNK_PIXEL_FRAMES,
            native_fps=NATIVE_FPS,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            modalities=list(MODALITIES),
            max_sessions=self.client.engine.max_sessions,
        )
