"""One rank: platform, process groups, model, KV pool and the sessions on them."""

from collections.abc import Callable
from pathlib import Path

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import Agreement, ExchangeTraffic, ParallelState
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.diffusion.models.interface import LiveSession, RealtimePipeline
from vllm_omni.diffusion.registry import model_of
from vllm_omni.diffusion.worker.memory import plan_kv_pool
from vllm_omni.errors import OmniError
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool
from vllm_omni.experimental.ar_diffusion.runner import ChunkRunner
from vllm_omni.platforms import create_platform
from vllm_omni.platforms.quarantine import QUARANTINE


class Worker:
    """Loads the model on construction and then runs commands.

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
        self.is_alone = parallel.control.size == 1
        self.platform = create_platform(config.device)
        self.device = self.platform.device(local_rank)
        load_pipeline = model_of(Path(config.model)).load_loader()
        self.pipeline: RealtimePipeline[LiveSession] = load_pipeline(
            config, platform=self.platform, device=self.device, parallel=parallel
        )
        free_bytes = self.platform.free_bytes(self.device)
        budget = plan_kv_pool(config, self.pipeline, self.platform, free_bytes)
        spec = self.pipeline.kv_cache_spec()
        self.pool = KVPool(spec, budget.num_pages, dtype=self.pipeline.dtype, device=self.device)
        self.pipeline.bind_pool(self.pool)
        self.runner = ChunkRunner(self.pipeline, self.platform)
        self._agreement = Agreement(parallel.control)
        self.ready = GroupCapacity(
            sessions=budget.sessions,
            num_pages=budget.num_pages,
            page_tokens=spec.page_tokens,
            page_bytes=spec.page_bytes,
            window_frames=spec.window_frames,
            quarantined=QUARANTINE.size,
        )

    @property
    def traffic(self) -> ExchangeTraffic:
        """What this rank has exchanged of the transformer's tokens."""
        return self.pipeline.traffic

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none.

        Raises:
            PeerRefusedError: if only other ranks refuse.
        """
        refusal = None
        try:
            self.runner.open(session_id, request)
        except OmniError as error:
            refusal = error
        try:
            self._agreement.confirm(refusal)
        except OmniError:
            if refusal is None:
                self.runner.close(session_id)
            raise

    def accept(self, plan: ChunkPlan) -> None:
        """Agree with all ranks that the chunk can be made; nothing has been begun if this raises.

        Raises:
            SessionClosedError: if the session is not open on this rank.
            PeerRefusedError: if only other ranks refuse.
        """
        self._agreement.confirm(self.runner.refusal(plan))

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk; ``deliver`` gets it before its commit, on the root rank."""
        return self.runner.run(plan, deliver)

    def close_session(self, session_id: str) -> None:
        """Free a session on this rank."""
        self.runner.close(session_id)

    def peak_bytes(self) -> int:
        """Peak memory of this rank."""
        return self.platform.peak_bytes(self.device)

    def shutdown(self) -> None:
        """Free all sessions and what the model shares with other ranks."""
        self.runner.close_all()
        self.pipeline.release()
