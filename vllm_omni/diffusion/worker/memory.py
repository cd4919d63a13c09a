"""Measured memory to KV pool: asks the platform, does the budget, allocates."""

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.interface import SizedModel, memory_needs
from vllm_omni.errors import OutOfKVMemoryError
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import (
    PoolBudget,
    in_gib,
    plan_pool,
)
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform

logger = get_logger(__name__)


def plan_kv_pool(
    config: OmniDiffusionConfig, pipeline: SizedModel, platform: Platform, free_bytes: int
) -> PoolBudget:
    """Pages for the sessions that the configuration allows and the memory admits.

    Raises:
        OutOfKVMemoryError: if not even one session fits.
    """
    spec, geometry = pipeline.kv_cache_spec(), config.prepared_geometry
    needs = memory_needs(pipeline, geometry)
    try:
        budget = plan_pool(
            needs,
            window_pages=spec.window_pages(geometry.tokens_per_frame),
            max_sessions=config.max_num_seqs,
            free_bytes=free_bytes,
            fraction=config.kv_cache.gpu_memory_fraction
            if platform.pool_from_free_memory
            else None,
        )
    except OutOfKVMemoryError as error:
        held = ", ".join(f"{name} {in_gib(size)}" for name, size in pipeline.weight_bytes().items())
        raise OutOfKVMemoryError(
            f"at {geometry}, {error} beside the weights ({held}); lower the size "
            "(ar_diffusion_height, ar_diffusion_width), use more ranks (ulysses_degree) or keep "
            "the text encoder on the host (text_encoder_device: cpu)"
        ) from None
    logger.info(
        "KV pool: %d pages of %d tokens, %d layers, %d local heads of %d channels, %d tokens per "
        "latent frame at %s, window %d latent frames (sink %d), text %d tokens x %d heads, "
        "sessions %d of %d requested",
        *(budget.num_pages, spec.page_tokens, spec.num_layers, spec.num_kv_heads, spec.head_dim),
        *(geometry.tokens_per_frame, geometry, spec.window_frames, spec.sink_frames),
        *(spec.text_tokens, spec.text_heads, budget.sessions, config.max_num_seqs),
    )
    if budget.raised:
        logger.warning(
            "gpu_memory_fraction %.2f of the %d bytes that the chunk being made leaves of %d free "
            "ones is less than one session needs; the pool was raised to one session",
            *(config.kv_cache.gpu_memory_fraction, free_bytes - needs.shared, free_bytes),
        )
    if budget.sessions < config.max_num_seqs:
        logger.warning(
            "max_num_seqs is %d but memory admits %d sessions at %s",
            *(config.max_num_seqs, budget.sessions, geometry),
        )
    return budget
