"""One live world on one rank: everything that lasts from open to close."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.diffusion.models.lingbot_world.attention import TextKV
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.camera_track import CameraState, CameraTrack
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, ConditionState
from vllm_omni.diffusion.models.lingbot_world.schedule import DmdSchedule
from vllm_omni.diffusion.models.lingbot_world.transformer import ChunkContext
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.errors import SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import SessionKV


@dataclass(frozen=True, slots=True)
class TextCondition:
    """The prompt as the transformer sees it.

    Attributes:
        embedding: encoder output, or a blend of two while a prompt changes.
        kv: its keys and values, one pair per layer.
    """

    embedding: Float[Tensor, "text_tokens text_dim"]
    kv: tuple[TextKV, ...]


@dataclass(frozen=True, slots=True)
class CommittedState:
    """State after the last committed chunk. Replaced whole, never changed.

    Attributes:
        next_chunk: index of the chunk to make.
        decoder: ``None`` when the session hands out latents.
        text: ``None`` before the first chunk.
    """

    next_chunk: int
    condition: ConditionState
    camera: CameraState
    decoder: DecoderState | None
    text: TextCondition | None

    @property
    def next_latent_frame(self) -> int:
        """Latent frames committed so far."""
        return self.next_chunk * LATENT_FRAMES_PER_CHUNK


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A denoised chunk that is not committed yet.

    Attributes:
        clean: latents of the last probe's estimate.
        condition: mask and image channels of the chunk.
        next_state: state once the commit forward has run.
    """

    clean: Float32[Tensor, "16 3 height width"]
    condition: Float[Tensor, "20 3 height width"]
    context: ChunkContext
    next_state: CommittedState


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What stays the same for the whole session.

    Attributes:
        output: what each chunk hands out.
        prompt: encoder output of the prompt that the session begins with.
        steps: embedded timesteps of the four probes and the commit.
        generator: draws all noise of the session.
    """

    output: OutputKind
    prompt: Float[Tensor, "text_tokens text_dim"]
    geometry: VideoGeometry
    schedule: DmdSchedule
    steps: tuple[TimeEmbedding, ...]
    conditions: ConditionEncoder
    cameras: CameraTrack
    generator: torch.Generator


class LingBotSession:
    """Created by open, changed by :meth:`commit`, freed by :meth:`close`, exactly once."""

    def __init__(
        self, session_id: str, parts: SessionParts, kv: SessionKV, committed: CommittedState
    ) -> None:
        self.session_id = session_id
        self.parts = parts
        self._kv: SessionKV | None = kv
        self._committed: CommittedState | None = committed
        self._pending: PendingChunk | None = None

    @property
    def kv(self) -> SessionKV:
        """The KV window."""
        if self._kv is None:
            raise SessionClosedError(f"session {self.session_id} is closed")
        return self._kv

    @property
    def committed(self) -> CommittedState:
        """State after the last committed chunk."""
        if self._committed is None:
            raise SessionClosedError(f"session {self.session_id} is closed")
        return self._committed

    @property
    def pending(self) -> PendingChunk:
        """The chunk that waits for its commit."""
        if self._pending is None:
            raise SessionClosedError(f"session {self.session_id} has no chunk to commit")
        return self._pending

    def hold(self, pending: PendingChunk) -> None:
        """Keep a denoised chunk until its commit forward."""
        self._pending = pending

    def commit(self) -> None:
        """Make the pending chunk part of the rollout: the only line that moves its state.

        The generator alone has moved on before, with the chunk's noise.
        """
        self._committed, self._pending = self.pending.next_state, None

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        if self._kv is not None:
            self._kv.close()
        self._kv = self._committed = self._pending = None
