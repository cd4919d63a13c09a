"""What a worker asks of a world model; the engine above knows only the messages."""

from collections.abc import Mapping
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Shaped

from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, ChunkTimings, SessionRequest
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec, MemoryNeeds


@runtime_checkable
class LiveSession(Protocol):
    """The state of one session on one rank."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...


@runtime_checkable
class TimedLaps(Protocol):
    """How long the parts of a chunk took."""

    def timings(self) -> ChunkTimings:
        """Return all laps. Call only after the device has finished their work."""
        ...


SessionT = TypeVar("SessionT", bound=LiveSession)


@runtime_checkable
class RealtimePipeline(Protocol[SessionT]):
    """A model that makes a rollout chunk by chunk. It holds weights; sessions hold state."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the window KV."""
        ...

    @property
    def attention_kernel(self) -> str:
        """Name of the kernel that attention runs."""
        ...

    @property
    def traffic(self) -> ExchangeTraffic:
        """What this rank has exchanged of the transformer's tokens."""
        ...

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return the shape of the window KV on this rank."""
        ...

    def state_bytes(self, geometry: VideoGeometry) -> int:
        """Count the bytes that a session of this size holds on this rank beside its KV window."""
        ...

    def workspace_bytes(self, geometry: VideoGeometry) -> int:
        """Count the bytes on this rank that a chunk holds from its start to its end."""
        ...

    def activation_bytes(self, geometry: VideoGeometry) -> int:
        """Count the bytes on this rank that layers take at most while they work."""
        ...

    def weight_bytes(self) -> Mapping[str, int]:
        """Count the bytes of the weights on this rank's device, by the name of the part."""
        ...

    def bind_pool(self, pool: KVPool) -> None:
        """Use this pool for all sessions to come."""
        ...

    def open_session(self, session_id: str, request: SessionRequest) -> SessionT:
        """Allocate and prepare a session.

        Raises:
            OutOfKVMemoryError: if its window does not fit.
            InvalidRequestError: if this rank cannot do what the request asks for.
        """
        ...

    def denoise_chunk(
        self, session: SessionT, plan: ChunkPlan
    ) -> tuple[Shaped[torch.Tensor, "..."] | None, TimedLaps]:
        """Make the next chunk's output; ``None`` on ranks that hand out nothing.

        Its times can be read once the output is on the host.
        """
        ...

    def commit_chunk(self, session: SessionT) -> ChunkTimings:
        """Make the chunk part of the history, and what the next one needs and no control decides.

        Returns:
            Milliseconds until each of these was done or queued.
        """
        ...

    def release(self) -> None:
        """Free what outlives the modules, such as process groups."""
        ...


def memory_needs(pipeline: RealtimePipeline, geometry: VideoGeometry) -> MemoryNeeds:
    """Count what one session of this size needs on this rank, by parts."""
    spec = pipeline.kv_cache_spec()
    return MemoryNeeds(
        window=spec.window_pages(geometry.tokens_per_frame) * spec.page_bytes,
        state=pipeline.state_bytes(geometry),
        workspace=pipeline.workspace_bytes(geometry),
        activations=pipeline.activation_bytes(geometry),
    )
