"""One live world on one rank: the state that lasts from the opening of a session to its end."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.diffusion.models.lingbot_world.attention import TextKV
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.camera import CameraState, CameraTrack
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, ConditionState
from vllm_omni.diffusion.models.lingbot_world.text import TokenIds
from vllm_omni.diffusion.models.lingbot_world.transformer import ChunkContext
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.errors import SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import SessionKV


@dataclass(frozen=True, slots=True)
class TextCondition:
    """The prompt in the form that the transformer reads.

    Attributes:
        embedding: output of the text encoder, or a blend of two while the prompt changes.
        kv: keys and values of the embedding, one pair per layer.
    """

    embedding: Float[Tensor, "text_tokens text_dim"]
    kv: tuple[TextKV, ...]


@dataclass(frozen=True, slots=True)
class CommittedState:
    """The state after the last committed chunk. It is replaced as a whole and never changed.

    Attributes:
        next_chunk: index of the chunk that is made next.
        decoder: history of the decoder; ``None`` on a rank that does not decode.
        text: condition of the last chunk; ``None`` before the first.
    """

    next_chunk: int
    condition: ConditionState
    camera: CameraState
    decoder: DecoderState | None
    text: TextCondition | None

    @property
    def next_latent_frame(self) -> int:
        """Number of latent frames that have been committed."""
        return self.next_chunk * LATENT_FRAMES_PER_CHUNK


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A denoised chunk that has not been committed.

    Attributes:
        clean: latents that the last denoising step has estimated.
        condition: mask and image channels of the chunk.
        next_state: state of the session after the commit.
    """

    clean: Float32[Tensor, "16 3 height width"]
    condition: Float[Tensor, "20 3 height width"]
    context: ChunkContext
    next_state: CommittedState


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """What a session is made with when it opens, and keeps until it ends.

    Attributes:
        output_kind: kind of data that each chunk hands out.
        prompt: tokens of the first prompt.
        num_chunks: length of the rollout, ``None`` until stopped.
        steps: embedded timesteps of the four denoising steps and of the commit.
        generator: source of all noise of the session.
    """

    output_kind: OutputKind
    prompt: TokenIds
    geometry: VideoGeometry
    num_chunks: int | None
    schedule: DmdSchedule
    steps: tuple[TimeEmbedding, ...]
    conditions: ConditionEncoder
    cameras: CameraTrack
    generator: torch.Generator


class LingBotSession:
    """One session. :meth:`commit` alone moves it on; :meth:`close` frees it."""

    def __init__(
        self, session_id: str, setup: SessionSetup, kv: SessionKV, committed: CommittedState
    ) -> None:
        self.session_id = session_id
        self.setup = setup
        self._kv: SessionKV | None = kv
        self._committed: CommittedState | None = committed
        self._pending: PendingChunk | None = None

    @property
    def kv(self) -> SessionKV:
        """The KV window of the session."""
        if self._kv is None:
            raise SessionClosedError(f"session {self.session_id} is closed")
        return self._kv

    @property
    def committed(self) -> CommittedState:
        """The state after the last committed chunk."""
        if self._committed is None:
            raise SessionClosedError(f"session {self.session_id} is closed")
        return self._committed

    @property
    def pending(self) -> PendingChunk:
        """The denoised chunk that waits for its commit."""
        if self._pending is None:
            raise SessionClosedError(f"session {self.session_id} has no chunk to commit")
        return self._pending

    def hold(self, pending: PendingChunk) -> None:
        """Keep a denoised chunk until its commit."""
        self._pending = pending

    def commit(self) -> None:
        """Make the pending chunk a part of the rollout.

        Only this changes committed state, except that the generator has already moved on when it
        drew the noise of the chunk.
        """
        self._committed, self._pending = self.pending.next_state, None

    def make_condition_ahead(self) -> None:
        """Make the condition of the next chunk, unless the rollout ends before it."""
        before = self.committed
        if before.next_chunk != self.setup.num_chunks:
            condition = self.setup.conditions.make_ahead(before.condition)
            self._committed = replace(before, condition=condition)

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        if self._kv is not None:
            self._kv.close()
        self._kv = self._committed = self._pending = None
