"""Chooses by name what the layers of the transformer are built with, and checks it once."""

from dataclasses import replace

import torch

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.diffusion.attention.registry import create_attention_backend
from vllm_omni.diffusion.attention.self_check import check_attention
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import LinearMethod, PlainLinearMethod
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.diffusion.layers.rope import BroadcastRotary, RotaryMethod
from vllm_omni.diffusion.layers.rotary_mul import FusedRotary, check_rotary
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    configured_post_attention,
)
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform

logger = get_logger(__name__)


def layer_parts(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    model: LingBotWorldConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelState,
    feed_forward: LinearMethod | None = None,
) -> LayerParts:
    """What the layers of one rank share.

    Args:
        feed_forward: instead of what the configuration says.

    Raises:
        ConfigError: if a choice does not exist, or is wrong on this device.
    """
    linear = PlainLinearMethod()
    backend = checked_backend(
        config, platform, head_dim=model.attention_head_dim, dtype=dtype, device=device
    )
    parts = LayerParts(
        config=model,
        dtype=dtype,
        linear=linear,
        backend=backend,
        tensor_parallel=parallel.tensor,
        exchange=UlyssesExchange(parallel.sequence),
        feed_forward=feed_forward or feed_forward_method(config, platform, linear),
        rotary=checked_rotary(config, platform, model=model, dtype=dtype, device=device),
        post_attention=configured_post_attention(
            config, platform, dim=model.dim, parallel=parallel, device=device
        ),
    )
    return parts if config.enforce_eager else uncompiled(parts)


def uncompiled(parts: LayerParts) -> LayerParts:
    """Parts whose window attention a compiler leaves alone."""
    return replace(parts, attend=torch.compiler.disable(parts.attend))


def checked_backend(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The configured attention backend, once it has agreed with float32 attention.

    Raises:
        ConfigError: if there is no such backend, or it is wrong on this device.
    """
    name = config.attention_backend
    backend = create_attention_backend(platform.attention_backend if name == "auto" else name)
    check_attention(backend, head_dim=head_dim, dtype=dtype, device=device)
    return backend


def checked_rotary(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    model: LingBotWorldConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> RotaryMethod:
    """The configured rotary method; a fused operator has agreed with torch's own before.

    Raises:
        ConfigError: if the platform has no such operator, or it is wrong on this device.
    """
    if not config.npu_rotary_mul:
        return BroadcastRotary()
    method = FusedRotary(
        platform.rotary_mul(), heads=model.num_attention_heads, head_dim=model.attention_head_dim
    )
    check_rotary(method, head_dim=model.attention_head_dim, dtype=dtype, device=device)
    logger.info("queries and keys are turned by %s", method.name)
    return method


def feed_forward_method(
    config: OmniDiffusionConfig, platform: Platform, otherwise: LinearMethod
) -> LinearMethod:
    """How the feed-forward linears are stored and multiplied.

    Raises:
        ConfigError: if they are to be quantised by a method, or on a platform, that cannot.
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
