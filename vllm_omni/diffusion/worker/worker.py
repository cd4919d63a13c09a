"""One rank: platform, model, KV pool and the sessions on them; the error of one ends no other."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.diffusion.models.interface import (
    LiveSession,
    RealtimePipeline,
    memory_needs,
)
from vllm_omni.diffusion.registry import model_of
from vllm_omni.errors import (
    DeviceOutOfMemoryError,
    InternalError,
    OmniError,
    OutOfKVMemoryError,
    SessionClosedError,
    SessionFailedError,
    WorkerFailedError,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool
from vllm_omni.experimental.ar_diffusion.kv_cache.window import PoolBudget, in_gib, plan_pool
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform, create_platform
from vllm_omni.platforms.quarantine import QUARANTINE

logger = get_logger(__name__)


class PeersLeftWaitingError(OmniError):
    """A chunk that all ranks had begun failed on this one; the others may wait for it for ever."""


class Worker:
    """Loads the model on construction and then opens, runs and closes sessions.

    A session that raises is closed; the others go on.

    Args:
        local_rank: index of this rank's device.
        parallel: the groups of ranks that this one belongs to; ``None`` for a rank that is alone.

    Attributes:
        capacity: what this rank can hold.

    Raises:
        CheckpointError: if the checkpoint is not this model.
        OutOfKVMemoryError: if not even one session fits.
    """

    def __init__(
        self,
        config: OmniDiffusionConfig,
        *,
        local_rank: int = 0,
        parallel: ParallelState | None = None,
    ) -> None:
        parallel = parallel or ParallelState()
        self._is_alone = parallel.control.size == 1
        self._control = parallel.control
        self.platform = create_platform(config.device)
        self.device = self.platform.device(local_rank)
        load_pipeline = model_of(Path(config.model), config.model_class_name).load_loader()
        self.pipeline: RealtimePipeline[LiveSession] = load_pipeline(
            config, platform=self.platform, device=self.device, parallel=parallel
        )
        free_bytes = self.platform.free_bytes(self.device)
        budget = plan_kv_pool(config, self.pipeline, self.platform, free_bytes)
        spec = self.pipeline.kv_cache_spec()
        self.pool = KVPool(spec, budget.num_pages, dtype=self.pipeline.dtype, device=self.device)
        self.pipeline.bind_pool(self.pool)
        self.sessions: dict[str, LiveSession] = {}
        self.capacity = GroupCapacity(
            sessions=budget.sessions,
            num_pages=budget.num_pages,
            page_tokens=spec.page_tokens,
            page_bytes=spec.page_bytes,
            window_frames=spec.window_frames,
            quarantined=QUARANTINE.size,
            attention_kernel=self.pipeline.attention_kernel,
        )

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none; one that is open begins anew.

        Raises:
            OutOfKVMemoryError: if its window does not fit.
            DeviceOutOfMemoryError: if memory ran out.
            SessionFailedError: if opening raised anything else.
            WorkerFailedError: if that left the device unusable.
            PeerRefusedError: if only other ranks refuse.
        """
        Worker.close_session(self, session_id)  # What a subclass holds for the session goes on.
        refusal = None
        try:
            with self._closing(session_id, f"opening session {session_id}"):
                self.sessions[session_id] = self.pipeline.open_session(session_id, request)
        except OmniError as error:
            refusal = error
        try:
            self._control.confirm(refusal)
        except OmniError:
            self.close_session(session_id)
            raise

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk: agree with all ranks that it can be made, denoise, hand out, commit.

        Whatever is raised once it was begun, the session is closed and its memory free.

        Args:
            deliver: takes the chunk as soon as its pixels are on the host, before its KV commit;
                on the root rank.

        Raises:
            SessionClosedError: if the session is not open on this rank; nothing was begun.
            PeerRefusedError: if only other ranks refuse; nothing was begun.
            DeviceOutOfMemoryError: if memory ran out on a rank that is alone.
            SessionFailedError: if the chunk raised anything else there.
            WorkerFailedError: if that left the device unusable.
            PeersLeftWaitingError: if anything was raised on one of several ranks.
        """
        session = self.sessions.get(plan.session_id)
        closed = SessionClosedError(f"session {plan.session_id} is not open")
        self._control.confirm(closed if session is None else None)
        assert session is not None, "a rank does not agree to a chunk of no session"
        try:
            with self._closing(plan.session_id, f"chunk {plan.chunk_index} of {plan.session_id}"):
                return self._run(session, plan, deliver)
        except OmniError as error:
            if self._is_alone:
                raise
            raise PeersLeftWaitingError(f"{type(error).__name__}: {error}") from error

    def close_session(self, session_id: str) -> None:
        """Free a session on this rank; one that is not open is no error."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def peak_bytes(self) -> int:
        """Return the peak memory of this rank's device, in bytes."""
        return self.platform.peak_bytes(self.device)

    def shutdown(self) -> None:
        """Free all sessions and what the model shares with other ranks."""
        for session_id in tuple(self.sessions):
            self.close_session(session_id)
        self.pipeline.release()

    def _run(
        self, session: LiveSession, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]
    ) -> ChunkTimings:
        output, laps = self.pipeline.denoise_chunk(session, plan)
        timings = ChunkTimings()
        if output is not None:
            data = self.platform.to_host(output).numpy()
            timings = laps.timings()
            deliver(ChunkResult(plan.session_id, plan.chunk_index, data, time.monotonic(), timings))
        after = self.pipeline.commit_chunk(session)
        condition_ms = timings.condition_ms + after.condition_ms
        return replace(timings, commit_ms=after.commit_ms, condition_ms=condition_ms)

    @contextmanager
    def _closing(self, session_id: str, step: str) -> Iterator[None]:
        """End the session by whatever a step raises, and no other session.

        A traceback holds the locals of every frame it passed, a chunk's activations among them,
        for as long as somebody holds the error; so they are dropped here.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.close_session(session_id)
            traceback.clear_frames(error.__traceback__)
            raise DeviceOutOfMemoryError(f"{step} ran out of device memory: {error}") from error
        except OmniError as error:
            self.close_session(session_id)
            if isinstance(error, InternalError):
                logger.exception("%s failed", step)
            raise
        except Exception as error:
            self.close_session(session_id)
            logger.exception("%s failed", step)
            traceback.clear_frames(error.__traceback__)
            self._check_device(step)
            raise SessionFailedError(
                f"{step} failed inside the model ({type(error).__name__})"
            ) from error

    def _check_device(self, step: str) -> None:
        """Ask the device for an answer: some errors corrupt its context for every later session.

        Raises:
            WorkerFailedError: if the device does nothing any more.
        """
        try:
            self.platform.synchronize(self.device)
        except RuntimeError as error:
            raise WorkerFailedError(
                f"{step} left the device unusable ({type(error).__name__}: {error}); the workers "
                "have to be restarted"
            ) from error


def plan_kv_pool(
    config: OmniDiffusionConfig, pipeline: RealtimePipeline, platform: Platform, free_bytes: int
) -> PoolBudget:
    """Pages for the sessions that the configuration allows and the memory admits.

    Raises:
        OutOfKVMemoryError: if not even one session fits.
    """
    spec, geometry = pipeline.kv_cache_spec(), config.prepared_geometry
    needs = memory_needs(pipeline, geometry)
    try:
        budget = plan_pool(
            needs,
            window_pages=spec.window_pages(geometry.tokens_per_frame),
            max_sessions=config.max_num_seqs,
            free_bytes=free_bytes,
            fraction=config.kv_cache.gpu_memory_fraction
            if platform.pool_from_free_memory
            else None,
        )
    except OutOfKVMemoryError as error:
        held = ", ".join(f"{name} {in_gib(size)}" for name, size in pipeline.weight_bytes().items())
        raise OutOfKVMemoryError(
            f"at {geometry}, {error} beside the weights ({held}); lower the size "
            "(ar_diffusion_height, ar_diffusion_width), use more ranks (ulysses_degree) or keep "
            "the text encoder on the host (text_encoder_device: cpu)"
        ) from None
    logger.info(
        "KV pool: %d pages of %d tokens, %d layers, %d local heads of %d channels, %d tokens per "
        "latent frame at %s, window %d latent frames (sink %d), text %d tokens x %d heads, "
        "sessions %d of %d requested",
        *(budget.num_pages, spec.page_tokens, spec.num_layers, spec.num_kv_heads, spec.head_dim),
        *(geometry.tokens_per_frame, geometry, spec.window_frames, spec.sink_frames),
        *(spec.text_tokens, spec.text_heads, budget.sessions, config.max_num_seqs),
    )
    if budget.raised:
        logger.warning(
            "gpu_memory_fraction %.2f of the %d bytes that the chunk being made leaves of %d free "
            "ones is less than one session needs; the pool was raised to one session",
            *(config.kv_cache.gpu_memory_fraction, free_bytes - needs.shared, free_bytes),
        )
    if budget.sessions < config.max_num_seqs:
        logger.warning(
            "max_num_seqs is %d but memory admits %d sessions at %s",
            *(config.max_num_seqs, budget.sessions, geometry),
        )
    return budget
