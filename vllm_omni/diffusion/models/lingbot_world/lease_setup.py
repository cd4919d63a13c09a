"""Sets up post-attention graphs for the configured size, before the KV pool takes its memory."""

import torch

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.lease import LeaseSignature
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    LeasedPostAttention,
    LeaseOptions,
)
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform

logger = get_logger(__name__)

GATE_ROWS = 1
"""All latent frames of a forward have one timestep, hence one gate."""


def lease_signature(
    transformer: CausalLingBotWorldTransformer3DModel,
    geometry: VideoGeometry,
    device: torch.device,
) -> LeaseSignature:
    """What a session of this size looks like to the graphs of this rank."""
    shared = LATENT_FRAMES_PER_CHUNK * geometry.tokens_per_frame
    tokens = shared // transformer.exchange.group.size
    return LeaseSignature(tokens, transformer.config.dim, GATE_ROWS, device)


def leased_geometry(config: OmniDiffusionConfig) -> VideoGeometry | None:
    """Size that post-attention graphs are captured at; ``None`` where they are not asked for.

    Raises:
        ConfigError: if the configuration does not go with them, before any weight is read.
    """
    if not config.leased_post_attention:
        return None
    if not config.enforce_eager:
        raise ConfigError(
            "lingbot_npu_leased_post_attention captures what enforce_eager: false would compile; "
            "set enforce_eager to true"
        )
    if config.geometry is None:
        raise ConfigError(
            "lingbot_npu_leased_post_attention captures one size before the first session; set "
            "ar_diffusion_height and ar_diffusion_width"
        )
    return config.geometry


def prepare_leases(
    geometry: VideoGeometry | None,
    transformer: CausalLingBotWorldTransformer3DModel,
    platform: Platform,
    device: torch.device,
) -> LeasedPostAttention | None:
    """Capture the graphs of a size; ``None`` for none.

    Raises:
        ConfigError: if the projections do not go with them, or a capture fails.
    """
    if geometry is None:
        return None
    leases = LeasedPostAttention(
        transformer.layers,
        platform.graph_runtime(),
        LeaseOptions(provider_owners=(transformer.exchange,)),
    )
    leases.prepare(lease_signature(transformer, geometry, device))
    logger.info(
        "captured %d post-attention graphs at %s with the %s runtime",
        leases.counters.captures,
        geometry,
        leases.runtime.name,
    )
    return leases
