"""Measured memory to KV pool: asks the platform, does the budget, allocates."""

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.interface import SizedModel
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import PoolBudget, plan_pool
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
    workspace_bytes = pipeline.workspace_bytes(geometry)
    budget = plan_pool(
        spec,
        tokens_per_frame=geometry.tokens_per_frame,
        max_sessions=config.max_num_seqs,
        other_bytes_per_session=pipeline.state_bytes(geometry),
        workspace_bytes=workspace_bytes,
        free_bytes=free_bytes,
        fraction=config.kv_cache.gpu_memory_fraction if platform.pool_from_free_memory else None,
    )
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
            *(config.kv_cache.gpu_memory_fraction, free_bytes - workspace_bytes, free_bytes),
        )
    if budget.sessions < config.max_num_seqs:
        logger.warning(
            "max_num_seqs is %d but memory admits %d sessions at %s",
            *(config.max_num_seqs, budget.sessions, geometry),
        )
    return budget
