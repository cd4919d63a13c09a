"""Runs chunks of many sessions on one rank and frees a session on every way out."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from vllm_omni.diffusion.messages import ChunkPlan, ChunkResult, ChunkTimings, SessionRequest
from vllm_omni.diffusion.models.interface import LiveSession, RealtimePipeline
from vllm_omni.errors import (
    DeviceOutOfMemoryError,
    InternalError,
    OmniError,
    SessionClosedError,
    SessionFailedError,
    WorkerFailedError,
)
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform

logger = get_logger(__name__)

Deliver = Callable[[ChunkResult], None]
"""Takes a chunk as soon as its pixels are on the host, before its KV commit."""


class ChunkRunner:
    """Sessions by id. A session that raises is closed; the others go on."""

    def __init__(self, pipeline: RealtimePipeline[LiveSession], platform: Platform) -> None:
        self._pipeline = pipeline
        self._platform = platform
        self._sessions: dict[str, LiveSession] = {}

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def open(self, session_id: str, request: SessionRequest) -> None:
        """Open a session.

        Raises:
            InternalError: if the id is taken.
            OutOfKVMemoryError: if its window does not fit.
            DeviceOutOfMemoryError: if memory ran out.
            SessionFailedError: if opening raised anything else.
            WorkerFailedError: if that left the device unusable.
        """
        if session_id in self._sessions:
            raise InternalError(f"session {session_id} is already open")
        with self._closing(session_id, f"opening session {session_id}"):
            self._sessions[session_id] = self._pipeline.open_session(session_id, request)

    def refusal(self, plan: ChunkPlan) -> OmniError | None:
        """Why the chunk cannot be begun; ``None`` if it can."""
        if plan.session_id not in self._sessions:
            return SessionClosedError(f"session {plan.session_id} is not open")
        return None

    def run(self, plan: ChunkPlan, deliver: Deliver) -> ChunkTimings:
        """Make one chunk: denoise, hand out, commit.

        Raises:
            SessionClosedError: if the session is not open.
            DeviceOutOfMemoryError: if memory ran out.
            SessionFailedError: if the chunk raised anything else.
            WorkerFailedError: if that left the device unusable.
                Whatever is raised, the session is closed and its memory free.
        """
        refusal = self.refusal(plan)
        if refusal is not None:
            raise refusal
        with self._closing(plan.session_id, f"chunk {plan.chunk_index} of {plan.session_id}"):
            return self._run(self._sessions[plan.session_id], plan, deliver)

    def close(self, session_id: str) -> None:
        """Free a session; one that is not open is no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def close_all(self) -> None:
        """Free every session."""
        for session_id in tuple(self._sessions):
            self.close(session_id)

    @contextmanager
    def _closing(self, session_id: str, step: str) -> Iterator[None]:
        """The session boundary: whatever a step raises ends its session and no other.

        A traceback holds the locals of every frame it passed, a chunk's activations among them,
        for as long as somebody holds the error; so they are dropped here.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.close(session_id)
            traceback.clear_frames(error.__traceback__)
            raise DeviceOutOfMemoryError(f"{step} ran out of device memory: {error}") from error
        except OmniError as error:
            self.close(session_id)
            if isinstance(error, InternalError):
                logger.exception("%s failed", step)
            raise
        except Exception as error:
            self.close(session_id)
            logger.exception("%s failed", step)
            traceback.clear_frames(error.__traceback__)
            self._check_device(step)
            raise SessionFailedError(
                f"{step} failed inside the model ({type(error).__name__})"
            ) from error

    def _check_device(self, step: str) -> None:
        """Some errors take the whole device context with them, and every later session.

        Raises:
            WorkerFailedError: if the device does nothing any more.
        """
        try:
            self._platform.synchronize(torch.device(self._platform.name))
        except RuntimeError as error:
            raise WorkerFailedError(
                f"{step} left the device unusable ({type(error).__name__}: {error}); the workers "
                "have to be restarted"
            ) from error

    def _run(self, session: LiveSession, plan: ChunkPlan, deliver: Deliver) -> ChunkTimings:
        output, laps = self._pipeline.denoise_chunk(session, plan)
        timings = ChunkTimings()
        if output is not None:
            data = self._platform.to_host(output).numpy()
            timings = laps.timings()
            deliver(ChunkResult(plan.session_id, plan.chunk_index, data, time.monotonic(), timings))
        return replace(timings, commit_ms=self._pipeline.commit_chunk(session))
