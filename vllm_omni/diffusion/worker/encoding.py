"""A rank that hands out video in place of pixels, where a session's request asks for it.

A thread of its own encodes a chunk and hands it out while the commit runs. On a GPU or NPU the
host has only queued the commit by then, so encoding takes none of the device's time.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import numpy as np
from typing_extensions import override

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.messages import ChunkPlan, ChunkResult, ChunkTimings, SessionRequest
from vllm_omni.diffusion.models.interface import LiveSession
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.logger import get_logger
from vllm_omni.outputs.media import ChunkEncoder

logger = get_logger(__name__)

Encoder = Callable[[], ChunkEncoder]
"""Gives the one encoder of a session, which it makes when it is first asked."""


class EncodingWorker(Worker):
    """Has an encoder for each session that asks for video.

    The encoder goes on when the session begins anew, since its stream does, and is free when the
    session is closed, by whatever. Only the root rank, which has the pixels, ever makes one.
    """

    def __init__(
        self,
        config: OmniDiffusionConfig,
        *,
        local_rank: int = 0,
        parallel: ParallelState | None = None,
    ) -> None:
        super().__init__(config, local_rank=local_rank, parallel=parallel)
        self._encoders: dict[str, Encoder] = {}

    @override
    def open_session(self, session_id: str, request: SessionRequest) -> None:
        super().open_session(session_id, request)
        if (video := request.video) is not None:
            stream = (request.width, request.height, request.fps, video.options, video.codec)
            self._encoders.setdefault(session_id, cache(partial(ChunkEncoder, *stream)))

    @override
    def close_session(self, session_id: str) -> None:
        super().close_session(session_id)
        self._encoders.pop(session_id, None)

    @override
    def _run(
        self, session: LiveSession, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]
    ) -> ChunkTimings:
        encoder = self._encoders.get(plan.session_id)
        if encoder is None:
            return super()._run(session, plan, deliver)
        deliveries: list[Future[None]] = []
        with ThreadPoolExecutor(1, "video") as thread:

            def encode_beside(made: ChunkResult) -> None:
                video = thread.submit(lambda: encoder().encode(made.data))
                deliveries.append(thread.submit(_hand_out, video, made, deliver))

            timings = super()._run(session, plan, encode_beside)
        for delivery in deliveries:
            delivery.result()
        return timings


def _hand_out(
    video: Future[bytes], made: ChunkResult, deliver: Callable[[ChunkResult], None]
) -> None:
    """Deliver a chunk's video, or that there is none: other ranks go on with the commit."""
    if (error := video.exception()) is not None:
        chunk = f"chunk {made.chunk_index} of {made.session_id}"
        logger.error("%s could not be encoded", chunk, exc_info=error)
    payload = b"" if error is not None else video.result()
    timings = replace(made.timings, encode_ms=(time.monotonic() - made.ready_s) * 1000.0)
    deliver(replace(made, data=np.frombuffer(payload, np.uint8), timings=timings))
