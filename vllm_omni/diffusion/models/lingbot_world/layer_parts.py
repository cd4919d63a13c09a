"""Chooses by name what the layers of the transformer are built with, and checks it once."""

import torch

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.diffusion.attention.registry import create_attention_backend
from vllm_omni.diffusion.attention.self_check import check_attention
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.layers.linear import LinearMethod
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform

logger = get_logger(__name__)


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
