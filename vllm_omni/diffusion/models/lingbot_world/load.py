"""Assembles the pipeline of one rank from a checkpoint directory."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vllm_omni.diffusion.data import KVCacheConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState
from vllm_omni.diffusion.layers.linear import LinearMethod
from vllm_omni.diffusion.layers.linear_backend import (
    NATIVE,
    LinearBackend,
    create_linear_backend,
)
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.chunk_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.config import (
    PIPELINE_CLASS,
    LingBotWorldConfig,
    read_flow_shift,
    read_json,
)
from vllm_omni.diffusion.models.lingbot_world.layer_parts import layer_parts
from vllm_omni.diffusion.models.lingbot_world.pipeline import (
    LingBotWorldCausalDMDPipeline,
    PipelineParts,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_gather import PixelGather, PixelMode
from vllm_omni.diffusion.models.lingbot_world.pixel_output import CACHE_PIECE_ELEMENTS
from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.diffusion.models.loader import load_weights, materialize, no_weights
from vllm_omni.errors import CheckpointError
from vllm_omni.platforms import Platform
from vllm_omni.platforms.quarantine import TransferOwners


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What the JSON files of a checkpoint say, read and checked before any weight."""

    transformer: LingBotWorldConfig
    vae: VaeConfig
    flow_shift: float


def read_checkpoint(model: Path, kv_cache: KVCacheConfig) -> CheckpointFacts:
    """Read and check all configuration files of a checkpoint.

    Raises:
        CheckpointError: naming file, field, expected and actual value.
    """
    index = read_json(model / "model_index.json")
    if index.get("_class_name") != PIPELINE_CLASS:
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
    """Check everything that needs no weights, then read those of this rank.

    Args:
        feed_forward: how the feed-forward linears are, instead of what the configuration says.

    Raises:
        CheckpointError: if files are missing or are not this model.
        UnsupportedParallelismError: if the heads cannot be split; before any weight is read.
    """
    model, dtype = Path(config.model), _DTYPES[config.dtype]
    facts = read_checkpoint(model, config.kv_cache)
    config.parallel.check_heads(facts.transformer.num_attention_heads)
    config.parallel.check_feed_forward(facts.transformer.ffn_dim)
    parts = layer_parts(
        config,
        platform,
        model=facts.transformer,
        dtype=dtype,
        device=device,
        parallel=parallel,
        feed_forward=feed_forward,
    )
    linears = create_linear_backend(
        config.linear_backend,
        config.quantization,
        checkpoint=model / "transformer",
        parallel=parallel,
        device=device,
        dtype=dtype,
    )
    text = TextEncoder.load(model, dtype=dtype, device=device)
    vae = load_vae(model, facts.vae, dtype=dtype, device=device)
    transformer = load_transformer(model, parts, device, linears)
    if not config.enforce_eager:
        compile_blocks(transformer)
    parts.post_attention.prepare(transformer.layers)
    output = ChunkOutput(vae, parallel, pixel_gather(config, platform, parallel, device))
    return LingBotWorldCausalDMDPipeline(
        config,
        PipelineParts(
            text=text,
            transformer=transformer,
            vae=vae,
            output=output,
            flow_shift=facts.flow_shift if config.flow_shift is None else config.flow_shift,
            device=device,
            dtype=dtype,
            linears=linears,
        ),
        platform,
    )


def pixel_gather(
    config: OmniDiffusionConfig,
    platform: Platform,
    parallel: ParallelState,
    device: torch.device,
) -> PixelGather:
    """How decoded columns get to the root; without sharding there is nothing to bring."""
    on_host = platform.collective_backend == "gloo"
    return PixelGather(
        mode=PixelMode.choose(config.pixel_output_mode, platform.name),
        group=parallel.sequence if config.vae_spatial_sharding else SINGLE,
        owners=TransferOwners(partial(platform.completion_event, device)),
        piece_elements=CACHE_PIECE_ELEMENTS if on_host else None,
    )


def compile_blocks(transformer: CausalLingBotWorldTransformer3DModel) -> None:
    """Compile the block once for all layers.

    The compiler stops at the window (see ``layer_parts``), so nothing that changes from chunk
    to chunk is a constant of the compiled code: one compilation serves every window length.
    """
    for block in transformer.blocks:
        block.compile(dynamic=False)


def load_transformer(
    model: Path, parts: LayerParts, device: torch.device, linears: LinearBackend = NATIVE
) -> CausalLingBotWorldTransformer3DModel:
    """Build the transformer of this rank and fill it from ``model/transformer``."""
    with no_weights():
        transformer = CausalLingBotWorldTransformer3DModel(parts)
    materialize(transformer, device)
    linears.install(transformer)
    load_weights(model / "transformer", transformer.checkpoint_targets())
    linears.process(transformer)
    return transformer


def load_vae(model: Path, config: VaeConfig, *, dtype: torch.dtype, device: torch.device) -> WanVAE:
    """Build the VAE and fill it from ``model/vae``."""
    with no_weights():
        vae = WanVAE(config).to(dtype)
    materialize(vae, device)
    load_weights(model / "vae", weight_targets(vae))
    vae.prepare()
    return vae


_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def _with_window(config: LingBotWorldConfig, kv_cache: KVCacheConfig) -> LingBotWorldConfig:
    """Apply the deploy file's window: its rolling and sink frames replace the checkpoint's."""
    sink = kv_cache.sink_chunks or config.sink_size
    rolling = kv_cache.window_chunks or config.window.ring_frames
    if (sink, rolling) == (config.sink_size, config.window.ring_frames):
        return config
    return replace(
        config, sink_size=sink, sliding_window_num_frames=sink + rolling, local_attn_size=-1
    )
