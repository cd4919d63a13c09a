"""Makes a rollout one chunk at a time: condition, camera, four probes, decode, commit.

Each step takes the session's committed state and returns what follows from it; the new state is
put in place by the last line of the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.traffic import ExchangeTraffic
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.layers.linear_backend import NATIVE, LinearBackend
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    PromptStep,
    SessionRequest,
)
from vllm_omni.diffusion.models.interface import RealtimePipeline
from vllm_omni.diffusion.models.lingbot_world.camera_track import create_camera_track
from vllm_omni.diffusion.models.lingbot_world.chunk import commit, denoise
from vllm_omni.diffusion.models.lingbot_world.chunk_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, prepare_image
from vllm_omni.diffusion.models.lingbot_world.schedule import COMMIT_TIMESTEP, DmdSchedule
from vllm_omni.diffusion.models.lingbot_world.session import (
    CommittedState,
    LingBotSession,
    PendingChunk,
    SessionParts,
    TextCondition,
)
from vllm_omni.diffusion.models.lingbot_world.stopwatch import ChunkStopwatch
from vllm_omni.diffusion.models.lingbot_world.text import TEXT_TOKENS, TextEncoder
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import KVCacheSpec
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.platforms import Platform
from vllm_omni.platforms.laps import HostLaps
from vllm_omni.platforms.quarantine import QUARANTINE


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The loaded model of one rank.

    Attributes:
        flow_shift: used by requests that name none.
    """

    text: TextEncoder
    transformer: CausalLingBotWorldTransformer3DModel
    vae: WanVAE
    output: ChunkOutput
    flow_shift: float
    device: torch.device
    dtype: torch.dtype
    linears: LinearBackend = NATIVE


class LingBotWorldCausalDMDPipeline(RealtimePipeline[LingBotSession]):
    """One model on one rank; any number of sessions, each with its own state."""

    def __init__(
        self, config: OmniDiffusionConfig, parts: PipelineParts, platform: Platform
    ) -> None:
        self.config = config
        self.parts = parts
        self.platform = platform
        self._pool: KVPool | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and the window KV."""
        return self.parts.dtype

    @property
    def traffic(self) -> ExchangeTraffic:
        """What this rank has exchanged of the transformer's tokens."""
        return self.parts.transformer.exchange.traffic

    def kv_cache_spec(self) -> KVCacheSpec:
        """Shape of the window KV; head counts come from the live modules."""
        transformer = self.parts.transformer
        model = transformer.config
        return KVCacheSpec(
            num_layers=len(transformer.blocks),
            num_kv_heads=transformer.local_heads // transformer.exchange.group.size,
            text_heads=transformer.local_heads,
            head_dim=model.attention_head_dim,
            window_frames=model.window.window_frames,
            sink_frames=model.window.sink_frames,
            text_tokens=TEXT_TOKENS,
            element_bytes=self.parts.dtype.itemsize,
            page_tokens=self.config.kv_cache.page_tokens,
        )

    def state_bytes(self, geometry: VideoGeometry) -> int:
        """Text KV, decoder history, and the encoder history until its fixed point."""
        encoder = self.parts.vae.encoder_state_bytes(geometry.height, geometry.width)
        return self.kv_cache_spec().text_bytes + encoder + self.parts.output.decoder_bytes(geometry)

    def workspace_bytes(self, geometry: VideoGeometry) -> int:
        """Camera modulation of a chunk, a second prompt, and VAE histories while they are replaced.

        Encoding holds the session's history, the one being made and the next; decoding does the
        same with its own, beside the new one of the encoder.
        """
        transformer, vae = self.parts.transformer, self.parts.vae
        tokens = transformer.chunk_tokens(geometry)
        per_layer = 2 * tokens * transformer.config.dim * self.parts.dtype.itemsize
        encoder = vae.encoder_state_bytes(geometry.height, geometry.width)
        histories = max(2 * encoder, encoder + 2 * self.parts.output.decoder_bytes(geometry))
        camera = len(transformer.blocks) * per_layer
        return camera + self.kv_cache_spec().text_bytes + histories

    def bind_pool(self, pool: KVPool) -> None:
        """Use this pool for all sessions to come."""
        self._pool = pool

    @torch.inference_mode()
    def open_session(self, session_id: str, request: SessionRequest) -> LingBotSession:
        """Take KV pages, embed prompt and timesteps, prepare picture and camera.

        Nothing here waits for another rank: any rank may refuse.

        Raises:
            OutOfKVMemoryError: if the window does not fit into the pool.
            UnsupportedParallelismError: if the Ulysses degree does not divide the size's tokens.
            InvalidRequestError: if noise cannot be drawn where the request says.
            WorkerFailedError: if an earlier failure has left the device unusable.
        """
        if self._pool is None:
            raise SessionClosedError("the pipeline has no KV pool yet")
        geometry = VideoGeometry(request.height, request.width)
        self.config.parallel.check_geometry(geometry)
        transformer = self.parts.transformer
        transformer.post_attention.begin_session(transformer.chunk_tokens(geometry))
        kv = SessionKV(self._pool, geometry.tokens_per_frame)
        try:
            parts = self._session_parts(request, geometry)
            committed = CommittedState(
                next_chunk=0,
                condition=parts.conditions.fresh(),
                camera=parts.cameras.fresh(),
                decoder=self.parts.output.fresh(request.output),
                text=None,
            )
        except BaseException:
            kv.close()
            raise
        return LingBotSession(session_id, parts, kv, committed)

    @torch.inference_mode()
    def denoise_chunk(
        self, session: LingBotSession, plan: ChunkPlan
    ) -> tuple[Shaped[Tensor, "..."] | None, ChunkStopwatch]:
        """Make the next chunk's pixels or latents; the KV commit is a call of its own.

        Writes the chunk's noisy keys and values into the window and moves the generator on;
        nothing else changes.
        """
        parts, before = session.parts, session.committed
        clock = self.platform.lap_clock(self.parts.device)
        watch = ChunkStopwatch(self.platform, self.parts.device, clock)
        condition, condition_state = parts.conditions.next_chunk(before.condition)
        watch.lap("condition_ms")
        camera, camera_state = parts.cameras.next_chunk(before.camera, plan)
        text = self._text(session, plan.prompt)
        context = self.parts.transformer.context(
            camera,
            text.kv,
            session.kv,
            geometry=parts.geometry,
            start_latent_frame=before.next_latent_frame,
        )
        watch.lap("camera_ms")
        with QUARANTINE.joined_by(parts, before, context, condition):
            clean = denoise(
                self.parts.transformer,
                condition=condition,
                context=context,
                schedule=parts.schedule,
                steps=parts.steps,
                generator=parts.generator,
            )
            watch.lap("probes_ms")
            output, decoder = self.parts.output.hand_out(clean, parts.output, before.decoder)
        watch.lap("decode_ms")
        after = replace(
            before,
            next_chunk=before.next_chunk + 1,
            condition=condition_state,
            camera=camera_state,
            decoder=decoder,
            text=text,
        )
        session.hold(PendingChunk(clean, condition, context, after))
        return output, watch

    @torch.inference_mode()
    def commit_chunk(self, session: LingBotSession) -> float:
        """Write the chunk's clean keys and values, then move the session on by one chunk.

        Returns:
            Milliseconds until the commit forward was done, or queued where the device has a queue.
        """
        parts, pending = session.parts, session.pending
        watch = ChunkStopwatch(self.platform, self.parts.device, HostLaps())
        if not self.config.reuse_last_step_kv:
            with QUARANTINE.joined_by(parts, session.committed, pending):
                commit(
                    self.parts.transformer,
                    clean=pending.clean,
                    condition=pending.condition,
                    context=pending.context,
                    step=parts.steps[-1],
                )
        watch.lap("commit_ms")
        session.commit()
        return watch.timings().commit_ms

    def release(self) -> None:
        """Free what the linears share with other ranks."""
        self.parts.linears.release()

    def _session_parts(self, request: SessionRequest, geometry: VideoGeometry) -> SessionParts:
        device, dtype = self.parts.device, self.parts.dtype
        schedule = DmdSchedule.with_shift(
            self.parts.flow_shift if request.flow_shift is None else request.flow_shift
        )
        timesteps = (*schedule.timesteps, COMMIT_TIMESTEP)
        return SessionParts(
            output=request.output,
            prompt=self.parts.text.embed(request.prompt),
            geometry=geometry,
            schedule=schedule,
            steps=tuple(
                self.parts.transformer.embed_time(torch.tensor([step])) for step in timesteps
            ),
            conditions=ConditionEncoder(
                self.parts.vae, prepare_image(request.image, geometry, device, dtype), dtype
            ),
            cameras=create_camera_track(request, geometry, dtype=dtype, device=device),
            generator=self._generator(request),
        )

    def _generator(self, request: SessionRequest) -> torch.Generator:
        place = request.generator_device or self.parts.device
        try:
            return torch.Generator(place).manual_seed(request.seed)
        except RuntimeError as error:
            raise InvalidRequestError(
                f"must be {' or '.join(sorted({'cpu', self.parts.device.type}))} here, got {place}",
                field="generator_device",
            ) from error

    def _text_condition(self, embedding: Float[Tensor, "text_tokens text_dim"]) -> TextCondition:
        return TextCondition(embedding, self.parts.transformer.embed_text(embedding))

    def _text(self, session: LingBotSession, step: PromptStep | None) -> TextCondition:
        """The prompt of the next chunk; under tensor parallelism its keys take exchanges."""
        text = session.committed.text
        if step is None:
            return text or self._text_condition(session.parts.prompt)
        target = self.parts.text.embed(step.prompt)
        if step.weight == 1.0:
            return self._text_condition(target)
        current = session.parts.prompt if text is None else text.embedding
        return self._text_condition(torch.lerp(current, target, step.weight))
