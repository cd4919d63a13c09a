"""Assembles the pipeline of one rank from a checkpoint directory.

What the layers of the transformer are built with is chosen by name, and checked once on the device.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vllm_omni.diffusion.attention.backend import AttentionBackend, create_attention_backend
from vllm_omni.diffusion.attention.reference import check_attention
from vllm_omni.diffusion.data import KVCacheConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState, is_root
from vllm_omni.diffusion.layers.linear import (
    NATIVE,
    GeluLinearMethod,
    LinearBackend,
    LinearMethod,
    PlainLinearMethod,
    create_linear_backend,
)
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.diffusion.layers.rope import BROADCAST, FusedRotary, RotaryMethod, check_rotary
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.models.checkpoint_files import read_json
from vllm_omni.diffusion.models.interface import memory_needs
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.blocks import EAGER, PostAttention
from vllm_omni.diffusion.models.lingbot_world.config import (
    PIPELINE_CLASS,
    LingBotWorldConfig,
    read_flow_shift,
)
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    configured_post_attention,
)
from vllm_omni.diffusion.models.lingbot_world.pipeline import (
    LingBotWorldCausalDMDPipeline,
    LoadedModel,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_output import (
    CACHE_PIECE_ELEMENTS,
    ChunkOutput,
    PixelGather,
    PixelMode,
)
from vllm_omni.diffusion.models.lingbot_world.text import Prompts, TextEncoder
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE, fuse_norms
from vllm_omni.diffusion.models.loader import load_weights, materialize
from vllm_omni.errors import CheckpointError, ConfigError
from vllm_omni.experimental.ar_diffusion.kv_cache.window import in_gib
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform, missing_for_compiling
from vllm_omni.platforms.quarantine import TransferOwners


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The checked contents of the JSON files of a checkpoint."""

    transformer: LingBotWorldConfig
    vae: VaeConfig
    flow_shift: float


def read_checkpoint(
    model: Path, kv_cache: KVCacheConfig, class_name: str | None = None
) -> CheckpointFacts:
    """Read and check all configuration files of a checkpoint.

    Args:
        class_name: the model that the deployment says it is; it wins over ``model_index.json``.

    Raises:
        CheckpointError: naming file, field, expected and actual value.
    """
    index = {} if class_name is not None else read_json(model / "model_index.json")
    if class_name is None and index.get("_class_name") != PIPELINE_CLASS:
        raise CheckpointError(
            f"model_index.json: _class_name must be {PIPELINE_CLASS}, got "
            f"{index.get('_class_name')!r}"
        )
    transformer = LingBotWorldConfig.from_dict(read_json(model / "transformer" / "config.json"))
    return CheckpointFacts(
        transformer=_with_window(transformer, kv_cache),
        vae=VaeConfig.from_json(read_json(model / "vae" / "config.json")),
        flow_shift=read_flow_shift(read_json(model / "scheduler" / "scheduler_config.json")),
    )


def load_pipeline(
    config: OmniDiffusionConfig,
    *,
    platform: Platform,
    device: torch.device,
    parallel: ParallelState,
    feed_forward: LinearMethod | None = None,
) -> LingBotWorldCausalDMDPipeline:
    """Check everything that needs no weights, then read the weights of this rank.

    Args:
        feed_forward: method of the feed-forward linears, instead of the configured one.

    Raises:
        CheckpointError: if files are missing or are not this model.
        UnsupportedParallelismError: if the heads cannot be split; before any weight is read.
    """
    config = compile_where_possible(config)
    model, dtype = Path(config.model), _DTYPES[config.dtype]
    facts = read_checkpoint(model, config.kv_cache, config.model_class_name)
    config.parallel.check_heads(facts.transformer.num_attention_heads)
    config.parallel.check_feed_forward(facts.transformer.ffn_dim)
    parts = layer_parts(
        config,
        platform,
        model=facts.transformer,
        device=device,
        parallel=parallel,
        feed_forward=feed_forward,
    )
    post_attention = configured_post_attention(
        config, platform, dim=facts.transformer.dim, parallel=parallel, device=device
    )
    linears = create_linear_backend(
        config.linear_backend,
        config.quantization,
        checkpoint=model / "transformer",
        parallel=parallel,
        device=device,
        dtype=dtype,
    )
    text = load_prompts(model, facts.transformer, parallel, dtype=dtype, device=device)
    vae = load_vae(model, facts.vae, dtype=dtype, device=device, fused=not config.enforce_eager)
    transformer = load_transformer(model, parts, device, linears, post_attention)
    _prepare_blocks(transformer, config)
    pipeline = LingBotWorldCausalDMDPipeline(
        config,
        LoadedModel(
            text=text,
            transformer=transformer,
            vae=vae,
            output=ChunkOutput(vae, parallel, pixel_gather(config, platform, parallel, device)),
            flow_shift=facts.flow_shift if config.flow_shift is None else config.flow_shift,
            device=device,
            linears=linears,
        ),
        platform,
    )
    place_text_encoder(config, pipeline, platform)
    return pipeline


def load_prompts(
    model: Path,
    config: LingBotWorldConfig,
    parallel: ParallelState,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Prompts:
    """Read the text encoder on the root rank alone: the others get its results."""
    encoder = TextEncoder.load(model, dtype=dtype, device=device) if parallel.is_root else None
    return Prompts(encoder, parallel.control, text_dim=config.text_dim, dtype=dtype, device=device)


def place_text_encoder(
    config: OmniDiffusionConfig, pipeline: LingBotWorldCausalDMDPipeline, platform: Platform
) -> None:
    """Move the text encoder of the root to the device, where the configuration and memory say so.

    Everything else is there already, so that what is free is known.
    """
    text, device = pipeline.model.text, pipeline.model.device
    if text.encoder is None or config.text_encoder_device == "cpu":
        return
    if config.text_encoder_device == "auto" and platform.pool_from_free_memory:
        needs = memory_needs(pipeline, config.prepared_geometry)
        free_bytes = platform.free_bytes(device)
        if needs.total > free_bytes - text.num_bytes:
            logger.warning(
                "the text encoder (%s GiB) works on the host, where a new prompt takes seconds: a "
                "world needs %s, %s GiB are free; text_encoder_device: device insists",
                *(in_gib(text.num_bytes), needs, in_gib(free_bytes)),
            )
            return
    text.encoder.move(device)


def pixel_gather(
    config: OmniDiffusionConfig,
    platform: Platform,
    parallel: ParallelState,
    device: torch.device,
) -> PixelGather:
    """Choose how decoded columns get to the root. The group has one rank if nothing is sharded."""
    on_host = platform.collective_backend == "gloo"
    return PixelGather(
        mode=PixelMode.choose(config.pixel_output_mode, platform.name),
        group=parallel.sequence if config.vae_spatial_sharding else SINGLE,
        owners=TransferOwners(partial(platform.completion_event, device)),
        piece_elements=CACHE_PIECE_ELEMENTS if on_host else None,
    )


def compile_where_possible(config: OmniDiffusionConfig) -> OmniDiffusionConfig:
    """Return the configuration, eager where this machine cannot compile, with one warning."""
    if config.enforce_eager or not (missing := missing_for_compiling(config.device)):
        return config
    if is_root():
        logger.warning(
            "blocks run eagerly, about a sixth slower: compiling needs %s, which is not here; "
            "install it, or set enforce_eager: true to say that this is meant",
            " and ".join(missing),
        )
    return replace(config, enforce_eager=True)


def load_transformer(
    model: Path,
    parts: LayerParts,
    device: torch.device,
    linears: LinearBackend = NATIVE,
    post_attention: PostAttention = EAGER,
) -> CausalLingBotWorldTransformer3DModel:
    """Build the transformer of this rank and load its weights from ``model/transformer``."""
    with torch.device("meta"):
        transformer = CausalLingBotWorldTransformer3DModel(parts, post_attention)
    materialize(transformer, device)
    linears.install(transformer)
    load_weights(model / "transformer", weight_targets(transformer))
    linears.process(transformer)
    return transformer


def _prepare_blocks(
    transformer: CausalLingBotWorldTransformer3DModel, config: OmniDiffusionConfig
) -> None:
    if not config.enforce_eager:
        transformer.compile_blocks(transformer.chunk_tokens(config.prepared_geometry))
    transformer.post_attention.prepare(transformer.layers)


def load_vae(
    model: Path, config: VaeConfig, *, dtype: torch.dtype, device: torch.device, fused: bool = False
) -> WanVAE:
    """Build the VAE and load its weights from ``model/vae``; ``fused``: fuse norms, on a GPU."""
    with torch.device("meta"):
        vae = WanVAE(config).to(dtype)
    materialize(vae, device)
    load_weights(model / "vae", weight_targets(vae))
    vae.prepare()
    if fused and not fuse_norms(vae):
        logger.warning("the VAE runs without its fused norm, slower: it is wrong on this GPU")
    return vae


_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def _with_window(config: LingBotWorldConfig, kv_cache: KVCacheConfig) -> LingBotWorldConfig:
    """Replace the checkpoint's rolling and sink frames by those of the deploy file."""
    sink = kv_cache.sink_chunks or config.sink_size
    rolling = kv_cache.window_chunks or config.window.ring_frames
    if (sink, rolling) == (config.sink_size, config.window.ring_frames):
        return config
    return replace(
        config, sink_size=sink, sliding_window_num_frames=sink + rolling, local_attn_size=-1
    )


logger = get_logger(__name__)


def layer_parts(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    model: LingBotWorldConfig,
    device: torch.device,
    parallel: ParallelState,
    feed_forward: LinearMethod | None = None,
) -> LayerParts:
    """Choose what the layers of one rank share.

    Args:
        feed_forward: method of the feed-forward linears, instead of the configured one.

    Raises:
        ConfigError: if a choice does not exist, or is wrong on this device.
    """
    linear, dtype = PlainLinearMethod(), _DTYPES[config.dtype]
    # What else stores the weights of the feed-forward part multiplies them, too.
    is_plain = feed_forward is None and config.linear_backend == "native"
    backend, kernel = checked_backend(
        config, platform, head_dim=model.attention_head_dim, dtype=dtype, device=device
    )
    parts = LayerParts(
        config=model,
        dtype=dtype,
        linear=linear,
        backend=backend,
        attention_kernel=kernel,
        tensor_parallel=parallel.tensor,
        exchange=UlyssesExchange(parallel.sequence),
        feed_forward=feed_forward or feed_forward_method(config, platform, linear),
        product_with_gelu=GeluLinearMethod.where_it_is(device) if is_plain else None,
        rotary=checked_rotary(config, platform, model=model, dtype=dtype, device=device),
    )
    return parts if config.enforce_eager else parts.around_the_compiler()


def checked_backend(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionBackend, str]:
    """Make the configured attention backend and compare it with float32 attention.

    Returns:
        The backend and the name of the kernel that it runs.

    Raises:
        ConfigError: if there is no such backend, or it is wrong on this device.
    """
    name = config.attention_backend
    backend = create_attention_backend(platform.attention_backend if name == "auto" else name)
    kernel = check_attention(backend, head_dim=head_dim, dtype=dtype, device=device)
    if is_root():
        logger.info("attention by the %s kernel of backend %s", kernel, backend.name)
    return backend, kernel


def checked_rotary(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    model: LingBotWorldConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> RotaryMethod:
    """Make the configured rotary method and compare a fused operator with torch.

    Raises:
        ConfigError: if the platform has no such operator, or it is wrong on this device.
    """
    if not config.npu_rotary_mul:
        return BROADCAST
    method = FusedRotary(
        platform.rotary_mul(), heads=model.num_attention_heads, head_dim=model.attention_head_dim
    )
    check_rotary(method, head_dim=model.attention_head_dim, dtype=dtype, device=device)
    logger.info("queries and keys are turned by %s", method.name)
    return method


def feed_forward_method(
    config: OmniDiffusionConfig, platform: Platform, otherwise: LinearMethod
) -> LinearMethod:
    """Choose how the feed-forward linears are stored and multiplied.

    Raises:
        ConfigError: if the configured quantisation does not exist, or not on this platform.
    """
    if config.npu_quant is None:
        return otherwise
    if (config.npu_quant, config.npu_quant_scope) != ("w8a8", "ffn"):
        raise ConfigError(
            "lingbot_npu_quant: w8a8 with lingbot_npu_quant_scope: ffn is the one combination, "
            f"got {config.npu_quant!r} and {config.npu_quant_scope!r}"
        )
    ops = platform.int8_ops()
    logger.info(
        "feed-forward linears in 8 bits by the %s operators, weights laid out %s",
        ops.name,
        config.npu_quant_weight_format,
    )
    return Int8LinearMethod(ops, fractal=config.npu_quant_weight_format == "nz")
