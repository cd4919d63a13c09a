"""The causal world transformer: embed, blocks over the KV window, head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, PATCH, VideoGeometry
from vllm_omni.diffusion.layers.linear import ReplicatedLinear
from vllm_omni.diffusion.layers.rope import (
    PatchEmbedding,
    RotaryEmbeddingWan,
    RotaryTables,
    patchify,
    timestep_sinusoid,
    unpatchify,
)
from vllm_omni.diffusion.models.lingbot_world.attention import (
    CameraModulation,
    LayerContext,
    LayerParts,
    LayerWindow,
    TextKV,
)
from vllm_omni.diffusion.models.lingbot_world.blocks import (
    EAGER,
    Head,
    LingBotWorldBlock,
    PostAttention,
    TimeEmbedding,
)
from vllm_omni.diffusion.models.lingbot_world.config import CAMERA_CHANNELS
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import (
    LayerPages,
    SessionKV,
    WindowPlan,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec
from vllm_omni.platforms.base import to_device


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """Everything that the five forwards of one chunk share.

    Attributes:
        camera: one modulation per layer.
        text: one pair of keys and values per layer.
        pages: of the KV pool, one pair per layer.
        plan: the chunk's place in the pages.
        rotary: tables of the chunk's positions.
    """

    camera: tuple[CameraModulation, ...]
    text: tuple[TextKV, ...]
    pages: tuple[LayerPages, ...]
    plan: WindowPlan
    rotary: RotaryTables

    def layers(self) -> Iterator[LayerContext]:
        """Yield the context of each layer in turn."""
        for camera, text, pages in zip(self.camera, self.text, self.pages, strict=True):
            yield LayerContext(camera, text, LayerWindow(pages, self.plan, self.rotary))


class CausalLingBotWorldTransformer3DModel(nn.Module):
    """Predicts the flow of one chunk of latents; holds weights and nothing else."""

    def __init__(self, parts: LayerParts, post_attention: PostAttention = EAGER) -> None:
        super().__init__()
        config, dtype, linear = parts.config, parts.dtype, parts.linear
        dim = config.dim
        self.config = config
        self.dtype = dtype
        self.attention_kernel = parts.attention_kernel
        self.exchange = parts.exchange
        self.post_attention = post_attention
        self.rotary_positions = RotaryEmbeddingWan(config.attention_head_dim)
        self.rotary = parts.rotary
        self.patch_embedding = PatchEmbedding(config.in_channels, dim, dtype)
        self.patch_embedding_wancamctrl = ReplicatedLinear(
            CAMERA_CHANNELS * PATCH * PATCH, dim, dtype, linear
        )
        self.c2ws_hidden_states_layer1 = ReplicatedLinear(dim, dim, dtype, linear)
        self.c2ws_hidden_states_layer2 = ReplicatedLinear(dim, dim, dtype, linear)
        self.text_embedding = nn.Sequential(
            ReplicatedLinear(config.text_dim, dim, dtype, linear),
            nn.GELU(approximate="tanh"),
            ReplicatedLinear(dim, dim, dtype, linear),
        )
        self.time_embedding = nn.Sequential(
            ReplicatedLinear(config.freq_dim, dim, dtype, linear),
            nn.SiLU(),
            ReplicatedLinear(dim, dim, dtype, linear),
        )
        self.time_projection = nn.Sequential(
            nn.SiLU(), ReplicatedLinear(dim, 6 * dim, dtype, linear)
        )
        self.blocks = nn.ModuleList(
            LingBotWorldBlock(parts, post_attention) for _ in range(config.num_layers)
        )
        self.head = Head(parts, config.out_channels * PATCH * PATCH)
        self._compiled_tokens: int | None = None

    def compile_blocks(self, tokens: int) -> None:
        """Compile the block once for all layers, for forwards of this many tokens on this rank.

        All other sizes run eagerly: compiling takes the better part of a minute, and nobody may
        wait for it within a chunk. The compiler stops at the window, so that nothing that changes
        from chunk to chunk is a constant of the compiled code; one compilation serves every window
        length.
        """
        self._compiled_tokens = tokens
        for block in self.blocks:
            block.compile(dynamic=False)

    def runs_compiled(self, tokens: int) -> bool:
        """Tell whether forwards of this many tokens on this rank run as well as any can.

        True also where nothing is compiled at all.
        """
        return self._compiled_tokens in {None, tokens}

    @property
    def local_heads(self) -> int:
        """Number of attention heads that this rank's weights make, before any exchange."""
        return self.layers[0].self_attn.local_heads

    def kv_cache_spec(self, *, text_tokens: int, page_tokens: int) -> KVCacheSpec:
        """Return the shape of a session's window on this rank, for pages of ``page_tokens``."""
        config = self.config
        return KVCacheSpec(
            num_layers=len(self.blocks),
            num_kv_heads=self.local_heads // self.exchange.group.size,
            text_heads=self.local_heads,
            head_dim=config.attention_head_dim,
            window_frames=config.window.window_frames,
            sink_frames=config.window.sink_frames,
            text_tokens=text_tokens,
            element_bytes=self.dtype.itemsize,
            page_tokens=page_tokens,
        )

    @property
    def layers(self) -> tuple[LingBotWorldBlock, ...]:
        """The blocks with their own type; a module list only says that they are modules."""
        return tuple(cast(LingBotWorldBlock, block) for block in self.blocks)

    def chunk_tokens(self, geometry: VideoGeometry) -> int:
        """Count the tokens of a chunk on this rank."""
        tokens = LATENT_FRAMES_PER_CHUNK * geometry.tokens_per_frame
        return self.exchange.plan.local_count(tokens)

    def embed_time(self, timesteps: Float32[Tensor, " rows"]) -> TimeEmbedding:
        """Embed one timestep per row; a schedule's rows can be embedded once and kept.

        Args:
            timesteps: best on the host, where float64 is what it says on every platform.
        """
        sinusoid = timestep_sinusoid(timesteps, self.config.freq_dim)
        sinusoid = to_device(sinusoid.to(self.dtype), self.patch_embedding.weight.device)
        embedded = self.time_embedding(sinusoid)
        return TimeEmbedding(
            head=embedded, blocks=self.time_projection(embedded).unflatten(-1, (6, -1))
        )

    def embed_text(self, prompt: Float[Tensor, "text_tokens text_dim"]) -> tuple[TextKV, ...]:
        """Compute the prompt's keys and values for every layer. Rows of padding count, too."""
        text = self.text_embedding(prompt)
        return tuple(block.cross_attn.text_kv(text) for block in self.layers)

    def embed_camera(
        self, camera: Float[Tensor, "384 latent_frames height width"]
    ) -> tuple[CameraModulation, ...]:
        """Compute every layer's modulation by the folded camera rays of a chunk."""
        tokens = self.exchange.plan.split(patchify(camera)).flatten(0, 1)
        hidden = self.patch_embedding_wancamctrl(tokens)
        activated = nn.functional.silu(self.c2ws_hidden_states_layer1(hidden))
        hidden = hidden + self.c2ws_hidden_states_layer2(activated)
        return tuple(block.camera_modulation(hidden) for block in self.layers)

    def context(
        self,
        camera: Float[Tensor, "384 latent_frames height width"],
        text: tuple[TextKV, ...],
        kv: SessionKV,
        *,
        geometry: VideoGeometry,
        start_latent_frame: int,
    ) -> ChunkContext:
        """Collect what the forwards of the chunk at ``start_latent_frame`` share.

        Args:
            camera: folded rays of the chunk.
            text: keys and values of the prompt.
            kv: the session's window.
        """
        return ChunkContext(
            camera=self.embed_camera(camera),
            text=text,
            pages=kv.pool.layers,
            plan=kv.plan(start_latent_frame, LATENT_FRAMES_PER_CHUNK),
            rotary=self.rotary_tables(geometry, start_latent_frame, camera.device),
        )

    def rotary_tables(
        self, geometry: VideoGeometry, start_latent_frame: int, device: torch.device
    ) -> RotaryTables:
        """Prepare the rotary tables of this rank's tokens of the chunk at the given frame."""
        whole = self.rotary_positions.tables(
            start_latent_frame=start_latent_frame,
            latent_frames=LATENT_FRAMES_PER_CHUNK,
            rows=geometry.token_rows,
            columns=geometry.token_columns,
            dtype=self.dtype,
            device=device,
        )
        frames = (LATENT_FRAMES_PER_CHUNK, geometry.tokens_per_frame)
        local = (
            self.exchange.plan.split(table.unflatten(0, frames)).flatten(0, 1)
            for table in (whole.cos, whole.sin)
        )
        return self.rotary.prepare(RotaryTables(*local))

    def forward(
        self,
        latents: Float[Tensor, "channels latent_frames height width"],
        time: TimeEmbedding,
        context: ChunkContext,
    ) -> Float[Tensor, "out_channels latent_frames height width"]:
        """Predict the flow of a chunk. Writes the chunk's keys and values into the window.

        Args:
            latents: noise | mask | image condition, in the model's dtype.
        """
        frames, height, width = latents.shape[1:]
        x = self._embed(latents)
        for block, layer in zip(self.layers, context.layers(), strict=True):
            x = self._run_block(block, x, time, layer)
        tokens = self.head(x, time).unflatten(0, (frames, -1))
        whole = self.exchange.gather_tokens(tokens)
        return unpatchify(whole, height // PATCH, width // PATCH)

    def write_window(
        self,
        latents: Float[Tensor, "channels latent_frames height width"],
        time: TimeEmbedding,
        context: ChunkContext,
    ) -> None:
        """Run the forward for its keys and values alone: the last layer stops there."""
        x = self._embed(latents)
        *blocks, last_block = self.layers
        *layers, last = context.layers()
        for block, layer in zip(blocks, layers, strict=True):
            x = self._run_block(block, x, time, layer)
        last_block.write_only(x, time, last.window)

    def _run_block(
        self,
        block: LingBotWorldBlock,
        x: Float[Tensor, "tokens dim"],
        time: TimeEmbedding,
        layer: LayerContext,
    ) -> Float[Tensor, "tokens dim"]:
        # The module's call is what was compiled; its method is not.
        run = block if self.runs_compiled(x.shape[0]) else block.forward
        return run(x, time, layer)

    def _embed(
        self, latents: Float[Tensor, "channels latent_frames height width"]
    ) -> Float[Tensor, "tokens dim"]:
        patches = self.exchange.plan.split(patchify(latents))
        return self.patch_embedding(patches).flatten(0, 1)
