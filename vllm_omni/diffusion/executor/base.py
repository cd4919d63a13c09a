"""Runs the same command on every rank of a worker group."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)


@runtime_checkable
class Executor(Protocol):
    """One worker group. Calls block; one call at a time.

    Every call raises WorkerFailedError when the group is lost.
    """

    def start(self) -> GroupCapacity:
        """Load the model on all ranks and say what they can hold."""
        ...

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none."""
        ...

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk. ``deliver`` gets it before the KV commit; returns after the commit."""
        ...

    def close_session(self, session_id: str) -> None:
        """Free a session on all ranks; one that is not open is no error."""
        ...

    def check_alive(self) -> None:
        """Look, without waiting, whether a rank has ended."""
        ...

    def peak_bytes(self) -> int:
        """Peak memory of the rank that used most."""
        ...

    def shutdown(self) -> None:
        """End the group; a second call does nothing."""
        ...
