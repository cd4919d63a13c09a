"""Ways to run a worker group: in this process, in processes of this machine, or by Ray."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)


@runtime_checkable
class Executor(Protocol):
    """One generation of a worker group; runs the same command on every rank.

    Calls block; one call at a time. Every call raises WorkerFailedError when the group is lost.
    """

    def start(self) -> GroupCapacity:
        """Load the model on all ranks and say what they can hold."""
        ...

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none; one that is open begins anew."""
        ...

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk; ``deliver`` gets it before its KV commit, after which this returns."""
        ...

    def close_session(self, session_id: str) -> None:
        """Free a session on all ranks; one that is not open is no error."""
        ...

    def check_alive(self) -> None:
        """Look, without waiting, whether a rank has ended."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak memory of the rank that used most, in bytes."""
        ...

    def shutdown(self) -> None:
        """End the group for good; a second call does nothing."""
        ...


def create_executor(config: OmniDiffusionConfig) -> Executor:
    """Make the executor that the configuration names, not started; only ``inline`` loads torch."""
    if config.executor == "inline":
        from vllm_omni.diffusion.executor.inline import InlineExecutor

        return InlineExecutor(config)
    if config.executor == "ray":
        envs.prepare_ray()
        from vllm_omni.diffusion.executor.ray_actors import RayExecutor

        return RayExecutor(config)
    from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor

    return MultiprocExecutor(config)


def connect(config: OmniDiffusionConfig) -> None:
    """Join this process to the cluster that the configuration names, if it names one.

    To be called in the main thread before handlers of signals are installed, which it would undo.
    """
    if config.executor == "ray":
        envs.prepare_ray()
        from vllm_omni.diffusion.executor import ray_actors

        ray_actors.connect(config.ray.address)
