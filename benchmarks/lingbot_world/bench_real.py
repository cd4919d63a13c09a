"""The shapes of the real model with random weights: kernels, one layer, chunks, decode, memory.

Each figure stands beside the practical bound of ``roofline.py`` where the device's rates are known.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from benchmarks.lingbot_world.bench_timing import Clock, gpu_state, peak_bytes
from benchmarks.lingbot_world.roofline import TRIMMED, work_of
from benchmarks.lingbot_world.roofline_counts import TEXT_TOKENS, Model, layer_flops
from benchmarks.lingbot_world.roofline_devices import (
    DEVICES,
    PRECISIONS,
    TERA,
    Device,
    chunk_time,
    decode_ms,
)
from benchmarks.lingbot_world.roofline_vae import Vae, count_decode
from vllm_omni.diffusion.attention.backend import AttentionBackend, create_attention_backend
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.linear import GeluLinearMethod, PlainLinearMethod
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts, TextKV
from vllm_omni.diffusion.models.lingbot_world.blocks import EAGER, PostAttention
from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DmdSchedule,
    commit,
    denoise,
)
from vllm_omni.diffusion.models.lingbot_world.config import CAMERA_CHANNELS, LingBotWorldConfig
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_uint8
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE, fuse_norms
from vllm_omni.diffusion.models.loader import materialize
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.platforms import create_platform

_STD = 0.02
_CHUNKS = 8
_FLOW_SHIFT = 5.0


@dataclass(frozen=True, slots=True)
class Scale:
    """What is built: the transformer, the autoencoder and the video's size."""

    transformer: LingBotWorldConfig
    vae: VaeConfig
    geometry: VideoGeometry
    repeats: int


def _vae_fields(base_dim: int) -> dict[str, object]:
    return {
        "_class_name": "AutoencoderKLWan", "base_dim": base_dim, "z_dim": 16,
        "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
    }  # fmt: skip


def scale_of(name: str) -> Scale:
    """``full`` is the released model at 832x480; ``tiny`` runs the same code anywhere."""
    if name == "full":
        return Scale(
            LingBotWorldConfig(), VaeConfig.from_json(_vae_fields(96)), VideoGeometry(480, 832), 20
        )
    small = LingBotWorldConfig(
        num_attention_heads=4, attention_head_dim=16, text_dim=64, freq_dim=64, ffn_dim=256,
        num_layers=3, sink_size=3, sliding_window_num_frames=9,
    )  # fmt: skip
    return Scale(small, VaeConfig.from_json(_vae_fields(8)), VideoGeometry(32, 48), 3)


def real_shapes(scale: Scale, device_name: str, bound_device: str | None) -> dict[str, object]:
    """Run everything once.

    Args:
        bound_device: whose rates in ``roofline_devices.py`` the bounds are of; ``None`` for no
            bounds.
    """
    platform = create_platform(device_name)
    device = platform.device(0)
    bench = RealBench(scale, device, platform.attention_backend, _rates(bound_device))
    with torch.inference_mode():
        return {
            "size": str(scale.geometry),
            "dtype": "bfloat16",
            "weights": f"random, N(0, {_STD})",
            "bounds_of": bound_device,
            "products": bench.products(),
            "attention": bench.attention(),
            "layer": bench.layer(),
            "chunks": bench.chunks(),
            "decode": bench.decode(),
            "peak_bytes": peak_bytes(device),
            "gpu_state_after": gpu_state() if device.type == "cuda" else None,
        }


def _rates(name: str | None) -> Device | None:
    return None if name is None else next(device for device in DEVICES if device.name == name)


def transformer_of(
    config: LingBotWorldConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    post_attention: PostAttention = EAGER,
) -> CausalLingBotWorldTransformer3DModel:
    """Build a transformer of one rank for a device, without weights."""
    parts = LayerParts(
        config=config,
        dtype=dtype,
        linear=PlainLinearMethod(),
        product_with_gelu=GeluLinearMethod.where_it_is(device),
        backend=backend,
        tensor_parallel=SINGLE,
        exchange=UlyssesExchange(SINGLE),
    ).around_the_compiler()
    with torch.device("meta"):
        return CausalLingBotWorldTransformer3DModel(parts, post_attention)


class World:
    """A transformer with the window of one session, and the parts of a chunk.

    Attributes:
        steps: embedded timesteps of the four probes and of the commit.
        size: latent frames of a chunk, and their rows and columns.
    """

    def __init__(
        self,
        transformer: CausalLingBotWorldTransformer3DModel,
        geometry: VideoGeometry,
        device: torch.device,
    ) -> None:
        self.transformer, self.geometry = transformer, geometry
        self.spec = transformer.kv_cache_spec(
            text_tokens=TEXT_TOKENS, page_tokens=KVCacheConfig().page_tokens
        )
        pages = self.spec.window_pages(geometry.tokens_per_frame)
        self.pool = KVPool(self.spec, pages, dtype=transformer.dtype, device=device)
        self.kv = SessionKV(self.pool, geometry.tokens_per_frame)
        self.schedule = DmdSchedule.with_shift(_FLOW_SHIFT)
        times = (*self.schedule.timesteps, COMMIT_TIMESTEP)
        self.steps = tuple(transformer.embed_time(torch.tensor([time])) for time in times)
        self.size = LATENT_FRAMES_PER_CHUNK, geometry.latent_height, geometry.latent_width

    def context(self, camera: torch.Tensor, text: tuple[TextKV, ...], start: int) -> ChunkContext:
        """What a chunk that begins with latent frame ``start`` knows from its start."""
        return self.transformer.context(
            camera, text, self.kv, geometry=self.geometry, start_latent_frame=start
        )

    def denoise(
        self, condition: torch.Tensor, context: ChunkContext, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the clean latents of four probes."""
        return denoise(
            self.transformer, condition=condition, context=context, schedule=self.schedule,
            steps=self.steps, generator=generator,
        )  # fmt: skip

    def commit(self, clean: torch.Tensor, condition: torch.Tensor, context: ChunkContext) -> None:
        """Write clean latents into the window."""
        step = self.steps[-1]
        commit(self.transformer, clean=clean, condition=condition, context=context, step=step)


class RealBench:
    """The model on its device, and the measurements of it."""

    def __init__(
        self, scale: Scale, device: torch.device, backend: str, rates: Device | None
    ) -> None:
        self.scale, self.device, self.rates = scale, device, rates
        self.clock = Clock(device)
        self.backend = create_attention_backend(backend)
        config = scale.transformer
        self.counts = Model(
            height=scale.geometry.height,
            width=scale.geometry.width,
            layers=config.num_layers,
            heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            ffn_dim=config.ffn_dim,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            window_latent_frames=config.window.window_frames,
            sink_latent_frames=config.window.sink_frames,
        )
        self.transformer = transformer_of(config, torch.bfloat16, device, self.backend)
        self._fill(self.transformer)
        self.world = World(self.transformer, scale.geometry, device)
        self.text = self.transformer.embed_text(self._random(TEXT_TOKENS, config.text_dim))

    def products(self) -> dict[str, dict[str, float | None]]:
        """Rates of the matrix products of one layer, in TFLOP/s."""
        dim, ffn = self.counts.dim, self.counts.ffn_dim
        tokens, measured = self.counts.chunk_tokens, {}
        for name, rows, columns, inner in (
            ("qkv", tokens, 3 * dim, dim), ("out", tokens, dim, dim),
            ("ffn_in", tokens, ffn, dim), ("ffn_out", tokens, dim, ffn),
            ("qkv of 4 ranks", tokens // 4, 3 * dim, dim),
            ("kv of 4 ranks", tokens // 4, 2 * dim, dim), ("q of 4 ranks", tokens // 4, dim, dim),
        ):  # fmt: skip
            x, weight = self._random(rows, inner), self._random(columns, inner)
            bias = self._random(columns)
            ms = self.clock.median(lambda: F.linear(x, weight, bias), self.scale.repeats)  # noqa: B023
            measured[name] = {
                "ms": ms,
                "tflops": 2 * rows * columns * inner / TERA / ms * 1e3,
                "bound_tflops": self.rates and self.rates.gemm_p,
            }
        return measured

    def attention(self) -> dict[str, float | None]:
        """Rate of self-attention over the full window, in TFLOP/s."""
        shape = self.counts.heads, self.counts.head_dim
        query = self._random(self.counts.chunk_tokens, *shape)
        key, value = (self._random(self.counts.window_tokens, *shape) for _ in range(2))
        scale = self.counts.head_dim**-0.5
        ms = self.clock.median(
            lambda: self.backend.attend(query, key, value, scale=scale), self.scale.repeats
        )
        flops = layer_flops(self.counts, self.counts.window_tokens).self_attention
        return {
            "ms": ms,
            "tflops": flops / TERA / ms * 1e3,
            "bound_tflops": self.rates and self._attention_rate(self.rates),
        }

    def layer(self) -> dict[str, float | None]:
        """One layer of a probe with the window full."""
        block, start = self.transformer.blocks[0], self.counts.window_latent_frames
        layer = next(self._context(start).layers())
        x, time = self._random(self.counts.chunk_tokens, self.counts.dim), self.world.steps[0]
        ms = self.clock.median(lambda: block(x, time, layer), self.scale.repeats)
        flops = layer_flops(self.counts, self.counts.window_tokens)
        bound = None
        if self.rates:
            attention = flops.self_attention + flops.cross_attention
            bound = 1e3 * flops.gemm / TERA / self.rates.gemm_p
            bound += 1e3 * attention / TERA / self._attention_rate(self.rates)
        return {"ms": ms, "bound_ms": bound}

    def chunks(self) -> list[dict[str, float | None]]:
        """Camera, four probes and commit of chunks 1 to 8, while the window fills."""
        generator = torch.Generator(self.device).manual_seed(0)
        condition = self._random(20, *self.world.size)
        for index in range(_CHUNKS):  # every length of the window has kernels of its own
            self._chunk(index, generator, condition)
        return [self._chunk(index, generator, condition) for index in range(_CHUNKS)]

    def decode(self) -> dict[str, float | None]:
        """Decode of a later chunk and its conversion to bytes."""
        vae = self.build_vae()
        latents = torch.randn(16, *self.world.size, device=self.device)
        _, state = vae.decode(latents, DecoderState())
        video, state = vae.decode(latents, state)
        ms = self.clock.median(lambda: vae.decode(latents, state), max(3, self.scale.repeats // 4))
        counted = count_decode(
            Vae(base_dim=self.scale.vae.base_dim), height=self.scale.geometry.height,
            width=self.scale.geometry.width, latent_frames=LATENT_FRAMES_PER_CHUNK, first=False,
        )  # fmt: skip
        bound = self.rates and decode_ms(self.rates, counted, ranks=1, element_bytes=2)
        uint8_ms = self.clock.median(lambda: to_uint8(video), self.scale.repeats)
        return {"ms": ms, "bound_ms": bound, "uint8_ms": uint8_ms}

    def build_vae(self) -> WanVAE:
        """Make the autoencoder as a compiled server has it, with random weights."""
        with torch.device("meta"):
            vae = WanVAE(self.scale.vae).to(torch.bfloat16)
        self._fill(vae)
        vae.prepare()
        assert fuse_norms(vae), "the fused norm is wrong on this GPU"
        return vae

    def _chunk(
        self, index: int, generator: torch.Generator, condition: torch.Tensor
    ) -> dict[str, float | None]:
        made: dict[str, object] = {}

        def embed() -> None:
            made["context"] = self._context(index * LATENT_FRAMES_PER_CHUNK)

        def probe() -> None:
            made["clean"] = self.world.denoise(condition, made["context"], generator)

        def write() -> None:
            self.world.commit(made["clean"], condition, made["context"])

        parts = [self.clock.once(work) for work in (embed, probe, write)]
        measured = dict(zip(("camera_ms", "probes_ms", "commit_ms"), parts, strict=True))
        bound = None
        if self.rates:
            work = work_of(self.counts, TRIMMED, 1, self.counts.visible_tokens(index))
            bound = chunk_time(
                self.counts, self.rates, work, ranks=1, precision=PRECISIONS[0]
            ).practical_ms
        return {"chunk": index + 1, **measured, "total_ms": sum(parts), "bound_ms": bound}

    def _attention_rate(self, rates: Device) -> float:
        return rates.attn_p * rates.fill(self.counts, ranks=1)

    def _context(self, start: int) -> ChunkContext:
        camera = self._random(CAMERA_CHANNELS, *self.world.size)
        return self.world.context(camera, self.text, start)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _fill(self, module: torch.nn.Module) -> None:
        materialize(module, self.device)
        for parameter in module.parameters():
            parameter.data.normal_(0.0, _STD)
