"""A worker group of one rank in the calling process."""

from collections.abc import Callable

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.diffusion.worker.process import prepare_environment, worker_class
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import ConfigError, WorkerFailedError


class InlineExecutor:
    """Runs the worker where it is called; for offline use on one device."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        if config.parallel.world_size > 1:
            raise ConfigError(
                f"{config.parallel.world_size} ranks need distributed_executor_backend: mp, got "
                "an inline executor"
            )
        self._config = config
        self._worker: Worker | None = None

    @property
    def worker(self) -> Worker:
        """The worker of this process, with its model loaded.

        Raises:
            WorkerFailedError: if it was not started or was shut down.
        """
        if self._worker is None:
            raise WorkerFailedError("the inline worker is not running")
        return self._worker

    def start(self) -> GroupCapacity:
        """Set the deployment's environment in this process, then load the model."""
        prepare_environment(self._config)
        self._worker = worker_class(self._config)(self._config)
        return self._worker.capacity

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on the worker; one that is open begins anew."""
        self.worker.open_session(session_id, request)

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk; ``deliver`` gets it before its KV commit, after which this returns."""
        return self.worker.run_chunk(plan, deliver)

    def close_session(self, session_id: str) -> None:
        """Free a session; one that is not open is no error."""
        self.worker.close_session(session_id)

    def check_alive(self) -> None:
        """Do nothing: the worker lives as long as this process."""

    def peak_bytes(self) -> int:
        """Return the peak memory of this process's device, in bytes."""
        return self.worker.peak_bytes()

    def shutdown(self) -> None:
        """Free the model; a second call does nothing."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
