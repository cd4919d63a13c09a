"""Whether the link between machines carries the exchanges of a chunk in time; asked at start-up."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState, RankGroup
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, chunk_play_ms
from vllm_omni.diffusion.registry import model_of
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec
from vllm_omni.logger import get_logger

_SAMPLE_BYTES = 8 << 20
_SAMPLES = 4

logger = get_logger(__name__)


def tell_slow_link(
    config: OmniDiffusionConfig, spec: KVCacheSpec, parallel: ParallelState, device: torch.device
) -> None:
    """Warn, once for a group, if its ranks exchange too much for the link between their machines.

    Every rank makes this call.
    """
    for setting, ranks, sent_bytes in (
        ("ulysses_degree", parallel.sequence, chunk_exchange_bytes),
        ("tensor_parallel_size", parallel.tensor, chunk_sum_bytes),
    ):
        if ranks.size > 1:
            measured = measure_link(ranks, device)
            warning = slow_link(setting, measured, sent_bytes(spec, config), config)
            if warning is not None and parallel.is_root:
                logger.warning("%s", warning)


def measure_link(group: RankGroup, device: torch.device) -> float:
    """Measure what a rank sends to the others of its group while all do, in bytes a second.

    Every rank of the group makes this call.
    """
    send = torch.zeros(group.size, _SAMPLE_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group.group)  # the first one connects
    received[0, 0].item()
    started_s = time.perf_counter()
    for _ in range(_SAMPLES):
        dist.all_to_all_single(received, send, group=group.group)
    received[0, 0].item()  # after the device has done them
    sent_bytes = _SAMPLES * _SAMPLE_BYTES * (group.size - 1)
    return sent_bytes / (time.perf_counter() - started_s)


def chunk_exchange_bytes(spec: KVCacheSpec, config: OmniDiffusionConfig) -> int:
    """Bytes that a rank sends to its Ulysses group for a chunk of the prepared size.

    Queries, keys, values and outputs of every layer in every forward, as
    ``docs/design/module/diffusion/parallelism.md`` derives them.
    """
    message = _hidden_bytes(spec, config) // config.parallel.world_size
    return 4 * message * (config.parallel.ulysses_degree - 1) * _layers(spec, config)


def chunk_sum_bytes(spec: KVCacheSpec, config: OmniDiffusionConfig) -> int:
    """Bytes that a rank sends to its tensor-parallel group for a chunk of the prepared size.

    Outputs of both attentions, the feed-forward and the camera injector of every layer in every
    forward are added over ``t`` ranks, which takes ``2 (t - 1) / t`` of their size from each.
    """
    ranks = config.parallel.tensor_parallel_size
    message = 2 * _hidden_bytes(spec, config) // ranks
    return 4 * message * (ranks - 1) * _layers(spec, config)


def _hidden_bytes(spec: KVCacheSpec, config: OmniDiffusionConfig) -> int:
    """Bytes of the hidden state of a chunk on one rank: its tokens, all features."""
    tokens = LATENT_FRAMES_PER_CHUNK * config.prepared_geometry.tokens_per_frame
    heads = spec.num_kv_heads * config.parallel.world_size
    per_token = heads * spec.head_dim * spec.element_bytes
    return tokens // config.parallel.ulysses_degree * per_token


def _layers(spec: KVCacheSpec, config: OmniDiffusionConfig) -> int:
    """Layers that a chunk passes, over all its forwards."""
    steps = model_of(Path(config.model), config.model_class_name).limits.inference_steps
    return spec.num_layers * (steps if config.reuse_last_step_kv else steps + 1)


def slow_link(
    setting: str, bytes_per_s: float, chunk_bytes: int, config: OmniDiffusionConfig
) -> str | None:
    """Say that a chunk's exchanges alone take longer than it plays; ``None`` if they do not."""
    exchange_s = chunk_bytes / bytes_per_s
    limits = model_of(Path(config.model), config.model_class_name).limits
    play_s = chunk_play_ms(limits.native_fps) / 1000.0
    if exchange_s <= play_s:
        return None
    return (
        f"not real time: the ranks that {setting} puts together are on several machines, whose "
        f"link carries {bytes_per_s / 1e9:.2f} GB/s for each rank; a chunk of "
        f"{config.prepared_geometry} exchanges {chunk_bytes / 1e9:.2f} GB, which takes "
        f"{exchange_s:.2f} s of the {play_s:.2f} s that it plays; keep the group on one machine "
        "(ray.placement: strict_pack) or give the machines a faster network"
    )
