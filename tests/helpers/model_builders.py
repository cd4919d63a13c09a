"""Small models and sessions for tests of the model core."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.tiny import tiny_config, tiny_prompt
from vllm_omni.diffusion.attention.backend import AttentionBackend, create_attention_backend
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.linear import PlainLinearMethod
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.messages import (
    OutputKind,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
)
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.diffusion.models.loader import materialize
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.tools.tiny_checkpoint import draw, scale_transformer, transformer_shapes

CPU = torch.device("cpu")
SMALL = VideoGeometry(32, 48)
TEXT_TOKENS = 20
SMALL_MODEL = LingBotWorldConfig(
    num_attention_heads=2,
    attention_head_dim=16,
    text_dim=24,
    freq_dim=32,
    ffn_dim=64,
    num_layers=2,
    sink_size=3,
    sliding_window_num_frames=9,
)
"""Two layers of two heads; tests replace what they are about."""


@cache
def weights_of(config: LingBotWorldConfig, seed: int = 7) -> dict[str, torch.Tensor]:
    """Random weights by checkpoint name; they do not depend on the window."""
    return draw(transformer_shapes(asdict(config)), seed=seed, scale=scale_transformer)


def transformer_parts(
    config: LingBotWorldConfig,
    *,
    backend: AttentionBackend | None = None,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelState | None = None,
) -> LayerParts:
    parallel = parallel or ParallelState()
    return LayerParts(
        config=config,
        dtype=dtype,
        linear=PlainLinearMethod(),
        backend=backend or create_attention_backend("sdpa"),
        tensor_parallel=parallel.tensor,
        exchange=UlyssesExchange(parallel.sequence),
    )


def small_transformer(
    config: LingBotWorldConfig = SMALL_MODEL,
    *,
    backend: AttentionBackend | None = None,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelState | None = None,
    parts: LayerParts | None = None,
) -> CausalLingBotWorldTransformer3DModel:
    """A transformer filled with :func:`weights_of`, or one rank's share of it."""
    parts = parts or transformer_parts(config, backend=backend, dtype=dtype, parallel=parallel)
    with torch.device("meta"):
        model = CausalLingBotWorldTransformer3DModel(parts)
    materialize(model, CPU)
    weights = weights_of(config)
    for name, target in weight_targets(model).items():
        target.store(weights[name][target.local_slices()])
    return model


@dataclass(frozen=True)
class ChunkInputs:
    """Random inputs of one chunk."""

    noisy: torch.Tensor
    clean: torch.Tensor
    camera: torch.Tensor


def chunk_inputs(chunk: int, geometry: VideoGeometry = SMALL) -> ChunkInputs:
    """The same inputs for the same chunk, whatever else a test does."""
    generator = torch.Generator().manual_seed(1000 + chunk)
    size = LATENT_FRAMES_PER_CHUNK, geometry.latent_height, geometry.latent_width
    return ChunkInputs(
        *(torch.randn(channels, *size, generator=generator) for channels in (36, 36)),
        camera=0.7 * torch.randn(384, *size, generator=generator),
    )


def text_rows(config: LingBotWorldConfig = SMALL_MODEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77)
    return torch.randn(TEXT_TOKENS, config.text_dim, generator=generator)


class ModelRollout:
    """A transformer with one session's window, driven chunk by chunk."""

    def __init__(
        self,
        model: CausalLingBotWorldTransformer3DModel,
        *,
        geometry: VideoGeometry = SMALL,
        page_tokens: int = 4,
        scattered: bool = False,
    ) -> None:
        self.model, self.geometry = model, geometry
        spec = model.kv_cache_spec(text_tokens=TEXT_TOKENS, page_tokens=page_tokens)
        pages = spec.window_pages(geometry.tokens_per_frame)
        self.pool = KVPool(spec, 2 * pages + 1, dtype=model.dtype, device=CPU)
        if scattered:
            fragment(self.pool)
        self.kv = SessionKV(self.pool, geometry.tokens_per_frame)
        self.text = model.embed_text(text_rows(model.config).to(model.dtype))

    def context(self, chunk: int) -> ChunkContext:
        start = LATENT_FRAMES_PER_CHUNK * chunk
        camera = chunk_inputs(chunk, self.geometry).camera.to(self.model.dtype)
        return self.model.context(
            camera, self.text, self.kv, geometry=self.geometry, start_latent_frame=start
        )

    def time(self, timestep: float) -> TimeEmbedding:
        return self.model.embed_time(torch.tensor([timestep], dtype=torch.float32))

    def probe(
        self, chunk: int, timestep: float = 937.5, latents: torch.Tensor | None = None
    ) -> torch.Tensor:
        noisy = chunk_inputs(chunk, self.geometry).noisy if latents is None else latents
        return self.model(noisy.to(self.model.dtype), self.time(timestep), self.context(chunk))

    def commit(self, chunk: int) -> None:
        clean = chunk_inputs(chunk, self.geometry).clean.to(self.model.dtype)
        self.model.write_window(clean, self.time(0.0), self.context(chunk))


def fragment(pool: KVPool) -> None:
    """Take every page one by one and give back every other, so that no two free ones touch."""
    singles = [pool.pages.allocate(1) for _ in range(pool.pages.num_pages)]
    for single in singles[::2]:
        pool.pages.free(single)


def windowed(sink: int, window: int, **changes: int) -> LingBotWorldConfig:
    """The small model with another window."""
    sizes = {"sink_size": sink, "sliding_window_num_frames": window, **changes}
    return replace(SMALL_MODEL, **sizes)


def keys_request(
    num_chunks: int,
    *,
    seed: int = 42,
    output: OutputKind = OutputKind.UINT8,
    geometry: VideoGeometry = SMALL,
    prompt: str = "a castle above a jungle",
) -> SessionRequest:
    """A request for a rollout that walks by scripted keys."""
    keys = [frozenset("w"), frozenset("wj"), frozenset("dl"), frozenset()]
    script = tuple(tuple(keys[(seed + c + f) % 4] for f in range(3)) for c in range(num_chunks))
    rgb = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return SessionRequest(
        prompt=tiny_prompt(prompt),
        image=SourceImage(rgb=rgb),
        height=geometry.height,
        width=geometry.width,
        num_chunks=num_chunks,
        seed=seed,
        camera=ScriptedKeys(script),
        output=output,
    )


def small_config(**changes: object) -> OmniDiffusionConfig:
    """The tiny checkpoint at the small size, with room for two sessions."""
    return tiny_config(**{"geometry": SMALL, "max_num_seqs": 2, **changes})


@cache
def tiny_worker() -> Worker:
    """A worker of the tiny checkpoint for two sessions. Leave no session open."""
    return Worker(small_config())


def write_transformer(
    directory: Path, config: LingBotWorldConfig, weights: dict[str, torch.Tensor]
) -> Path:
    """A ``transformer`` folder with one weight file."""
    folder = directory / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder
