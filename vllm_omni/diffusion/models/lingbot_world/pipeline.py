"""Makes a rollout one chunk at a time: condition, camera, four denoising steps, decode, commit.

Each step reads the committed state of the session and returns a new one; the last line of the
commit puts the new state in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic, is_root
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.linear import NATIVE, LinearBackend
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkTimings,
    PromptStep,
    SessionRequest,
)
from vllm_omni.diffusion.models.interface import RealtimePipeline
from vllm_omni.diffusion.models.lingbot_world.camera import create_camera_track
from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DmdSchedule,
    commit,
    denoise,
)
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, prepare_image
from vllm_omni.diffusion.models.lingbot_world.pixel_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.session import (
    CommittedState,
    LingBotSession,
    PendingChunk,
    SessionSetup,
    TextCondition,
)
from vllm_omni.diffusion.models.lingbot_world.text import Prompts
from vllm_omni.diffusion.models.lingbot_world.tokenizer import TEXT_TOKENS
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.diffusion.models.loader import module_bytes
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform
from vllm_omni.platforms.laps import ChunkStopwatch, LapClock
from vllm_omni.platforms.quarantine import QUARANTINE

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The loaded model of one rank.

    Attributes:
        flow_shift: flow shift of requests that name none.
        device: device of all weights.
    """

    text: Prompts
    transformer: CausalLingBotWorldTransformer3DModel
    vae: WanVAE
    output: ChunkOutput
    flow_shift: float
    device: torch.device
    linears: LinearBackend = NATIVE


class LingBotWorldCausalDMDPipeline(RealtimePipeline[LingBotSession]):
    """One model on one rank, with any number of sessions that each have their own state.

    Attributes:
        waits_at_laps: whether each timed part of a chunk ends only after the device has finished
            it. Benchmarks set it; it makes chunks slower.
    """

    def __init__(self, config: OmniDiffusionConfig, model: LoadedModel, platform: Platform) -> None:
        self.config = config
        self.model = model
        self.platform = platform
        self.waits_at_laps = False
        self._pool: KVPool | None = None
        self._told_eager: set[VideoGeometry] = set()

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights, activations and the KV window."""
        return self.model.transformer.dtype

    @property
    def attention_kernel(self) -> str:
        """Name of the kernel that self and cross-attention run."""
        return self.model.transformer.attention_kernel

    @property
    def traffic(self) -> ExchangeTraffic:
        """Counts what this rank has exchanged of the transformer's tokens."""
        return self.model.transformer.exchange.traffic

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return the shape of the KV window, with the head counts of the loaded modules."""
        return self.model.transformer.kv_cache_spec(
            text_tokens=TEXT_TOKENS, page_tokens=self.config.kv_cache.page_tokens
        )

    def state_bytes(self, geometry: VideoGeometry) -> int:
        """Count a session's text KV, VAE histories and next condition, in bytes on this rank."""
        model, config = self.model, self.model.transformer.config
        values = LATENT_FRAMES_PER_CHUNK * geometry.latent_height * geometry.latent_width
        condition = (config.in_channels - config.out_channels) * values * self.dtype.itemsize
        histories = model.output.encoder_bytes(geometry) + model.output.decoder_bytes(geometry)
        return self.kv_cache_spec().text_bytes + histories + condition

    def workspace_bytes(self, geometry: VideoGeometry) -> int:
        """Count what the chunk being made holds, in bytes on this rank.

        That is the camera modulation of all layers, the keys and values of a second prompt, and
        VAE histories while they are replaced: a coder holds the history being made beside the next
        one, and the two coders never work at once.
        """
        transformer, output = self.model.transformer, self.model.output
        tokens = transformer.chunk_tokens(geometry)
        per_layer = 2 * tokens * transformer.config.dim * self.dtype.itemsize
        histories = 2 * max(output.encoder_bytes(geometry), output.decoder_bytes(geometry))
        camera = len(transformer.blocks) * per_layer
        return camera + self.kv_cache_spec().text_bytes + histories

    def activation_bytes(self, geometry: VideoGeometry) -> int:
        """Count what layers take at most while they work, in bytes on this rank.

        The autoencoder takes most: it works at full resolution, the transformer on patches.
        """
        return self.model.output.activation_bytes(geometry)

    def weight_bytes(self) -> dict[str, int]:
        """Count the weights on this rank's device, in bytes, by the name of the part."""
        model = self.model
        held = {"transformer": module_bytes(model.transformer), "VAE": module_bytes(model.vae)}
        if model.text.is_on(model.device):
            held["text encoder"] = model.text.num_bytes
        return held

    def bind_pool(self, pool: KVPool) -> None:
        """Use this pool for all sessions that will be opened."""
        self._pool = pool

    @torch.inference_mode()
    def open_session(self, session_id: str, request: SessionRequest) -> LingBotSession:
        """Take KV pages, embed prompt and timesteps, prepare picture and camera.

        Nothing here waits for another rank, so that any rank may refuse.

        Raises:
            OutOfKVMemoryError: if the window does not fit into the pool.
            UnsupportedParallelismError: if the Ulysses degree does not divide the size's tokens.
            InvalidRequestError: if noise cannot be drawn where the request says.
            WorkerFailedError: if an earlier failure has left the device unusable.
        """
        if self._pool is None:
            raise SessionClosedError("the pipeline has no KV pool yet")
        geometry = request.geometry
        self.config.parallel.check_geometry(geometry)
        transformer = self.model.transformer
        tokens = transformer.chunk_tokens(geometry)
        transformer.post_attention.begin_session(tokens)
        self._tell_eager(geometry, tokens)
        kv = SessionKV(self._pool, geometry.tokens_per_frame)
        try:
            setup = self._setup(request, geometry)
            committed = CommittedState(
                next_chunk=0,
                condition=setup.conditions.fresh(),
                camera=setup.cameras.fresh(),
                decoder=self.model.output.fresh(request.output),
                text=None,
            )
        except BaseException:
            kv.close()
            raise
        return LingBotSession(session_id, setup, kv, committed)

    @torch.inference_mode()
    def denoise_chunk(
        self, session: LingBotSession, plan: ChunkPlan
    ) -> tuple[Shaped[Tensor, "..."] | None, ChunkStopwatch]:
        """Make the pixels or latents of the next chunk; :meth:`commit_chunk` follows.

        This writes the chunk's noisy keys and values into the window and draws its noise. Nothing
        else of the session changes.

        Returns:
            The output on the root rank, ``None`` on others, and the times of the chunk.
        """
        setup, before = session.setup, session.committed
        watch = self._stopwatch(self.platform.lap_clock(self.model.device))
        condition, condition_state = setup.conditions.next_chunk(before.condition)
        watch.lap("condition_ms")
        camera, camera_state = setup.cameras.next_chunk(before.camera, plan)
        text = self._text(session, plan.prompt)
        context = self.model.transformer.context(
            camera,
            text.kv,
            session.kv,
            geometry=setup.geometry,
            start_latent_frame=before.next_latent_frame,
        )
        watch.lap("camera_ms")
        with QUARANTINE.joined_by(setup, before, context, condition):
            clean = denoise(
                self.model.transformer,
                condition=condition,
                context=context,
                schedule=setup.schedule,
                steps=setup.steps,
                generator=setup.generator,
            )
            watch.lap("probes_ms")
            kind = setup.output_kind
            handed_out, decoder = self.model.output.hand_out(clean, kind, before.decoder)
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
        return handed_out, watch

    @torch.inference_mode()
    def commit_chunk(self, session: LingBotSession) -> ChunkTimings:
        """Write the clean keys and values of the chunk, then put the session's new state in place.

        Until its fixed point, the condition of the chunk after this one is made here, too: the
        pixels have left, and the next control waits for nothing but its own chunk.

        Returns:
            Milliseconds of both until they were done or, on a device with a queue, were queued.
        """
        setup, pending = session.setup, session.pending
        watch = self._stopwatch(LapClock())
        if not self.config.reuse_last_step_kv:
            with QUARANTINE.joined_by(setup, session.committed, pending):
                commit(
                    self.model.transformer,
                    clean=pending.clean,
                    condition=pending.condition,
                    context=pending.context,
                    step=setup.steps[-1],
                )
        watch.lap("commit_ms")
        session.commit()
        session.make_condition_ahead()
        watch.lap("condition_ms")
        return watch.timings()

    def release(self) -> None:
        """Free what the linear layers share with other ranks."""
        self.model.linears.release()

    def _tell_eager(self, geometry: VideoGeometry, tokens: int) -> None:
        """Say once for each size that it is slower than the size that was prepared."""
        told = geometry in self._told_eager or not is_root()
        if told or self.model.transformer.runs_compiled(tokens):
            return
        self._told_eager.add(geometry)
        logger.warning(
            "worlds of %s run eagerly, about a sixth slower: blocks are compiled for %s alone; "
            "another size is set by ar_diffusion_height and ar_diffusion_width",
            *(geometry, self.config.prepared_geometry),
        )

    def _setup(self, request: SessionRequest, geometry: VideoGeometry) -> SessionSetup:
        device, dtype = self.model.device, self.dtype
        self.model.text.prepare(request.prompt.ids)
        schedule = DmdSchedule.with_shift(
            self.model.flow_shift if request.flow_shift is None else request.flow_shift
        )
        timesteps = (*schedule.timesteps, COMMIT_TIMESTEP)
        return SessionSetup(
            output_kind=request.output,
            prompt=request.prompt.ids,
            geometry=geometry,
            num_chunks=request.num_chunks,
            schedule=schedule,
            steps=tuple(
                self.model.transformer.embed_time(torch.tensor([step])) for step in timesteps
            ),
            conditions=ConditionEncoder(
                self.model.vae,
                prepare_image(request.image, geometry, device, dtype),
                dtype,
                *self.model.output.encoder_share(geometry.latent_width),
            ),
            cameras=create_camera_track(request, geometry, dtype=dtype, device=device),
            generator=self._generator(request),
        )

    def _stopwatch(self, clock: LapClock) -> ChunkStopwatch:
        wait = partial(self.platform.synchronize, self.model.device)
        return ChunkStopwatch(clock, wait if self.waits_at_laps else None)

    def _generator(self, request: SessionRequest) -> torch.Generator:
        place = request.generator_device or self.model.device
        try:
            return torch.Generator(place).manual_seed(request.seed)
        except RuntimeError as error:
            raise InvalidRequestError(
                f"must be {' or '.join(sorted({'cpu', self.model.device.type}))} here, got {place}",
                field="generator_device",
            ) from error

    def _text_condition(self, embedding: Float[Tensor, "text_tokens text_dim"]) -> TextCondition:
        return TextCondition(embedding, self.model.transformer.embed_text(embedding))

    def _text(self, session: LingBotSession, step: PromptStep | None) -> TextCondition:
        """Make the text condition of the next chunk; tensor parallelism exchanges for it."""
        text, first = session.committed.text, session.setup.prompt
        if step is None:
            return text or self._text_condition(self.model.text.embed(first))
        target = self.model.text.embed(step.prompt.ids)
        if step.weight == 1.0:
            return self._text_condition(target)
        current = self.model.text.embed(first) if text is None else text.embedding
        return self._text_condition(torch.lerp(current, target, step.weight))
