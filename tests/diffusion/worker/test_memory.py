"""The pool that a worker plans, and what it says when memory is short."""

import logging
from dataclasses import replace

import pytest

from tests.helpers.model_builders import SMALL, small_config, tiny_worker
from vllm_omni.diffusion.data import DEFAULT_GEOMETRY, KVCacheConfig
from vllm_omni.diffusion.models.lingbot_world.pixel_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.vae.memory import decoder_bytes, encoder_bytes
from vllm_omni.diffusion.worker.worker import plan_kv_pool
from vllm_omni.errors import OutOfKVMemoryError
from vllm_omni.experimental.ar_diffusion.kv_cache.window import MemoryNeeds
from vllm_omni.platforms.cpu import CpuPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

PLENTY = 10**12


class SharingPlatform(CpuPlatform):
    """A host that shares out its free memory, as accelerators do."""

    pool_from_free_memory = True


def session_bytes(geometry=SMALL):
    pipeline = tiny_worker().pipeline
    spec = pipeline.kv_cache_spec()
    window = spec.window_pages(geometry.tokens_per_frame) * spec.page_bytes
    return window + pipeline.state_bytes(geometry)


def workspace_bytes(geometry=SMALL):
    pipeline = tiny_worker().pipeline
    return pipeline.workspace_bytes(geometry) + pipeline.activation_bytes(geometry)


def plan(config, free_bytes=PLENTY, platform=None):
    return plan_kv_pool(config, tiny_worker().pipeline, platform or CpuPlatform(), free_bytes)


def test_the_cpu_takes_what_its_sessions_need():
    config = small_config(max_num_seqs=3)
    pages = tiny_worker().pipeline.kv_cache_spec().window_pages(SMALL.tokens_per_frame)
    budget = plan(config)
    assert (budget.sessions, budget.num_pages) == (3, 3 * pages)


def test_an_accelerator_takes_its_share():
    config = small_config(max_num_seqs=8, kv_cache=KVCacheConfig(gpu_memory_fraction=0.5))
    budget = plan(config, 6 * session_bytes() + workspace_bytes() + 10, SharingPlatform())
    assert budget.sessions == 3


def test_a_share_too_small_is_raised_and_said(caplog):
    config = small_config(kv_cache=KVCacheConfig(gpu_memory_fraction=0.01))
    with caplog.at_level(logging.WARNING, "vllm_omni"):
        budget = plan(config, 2 * session_bytes() + workspace_bytes(), SharingPlatform())
    assert (budget.sessions, budget.raised) == (1, True)
    assert "gpu_memory_fraction 0.01" in caplog.text


def test_fewer_sessions_than_asked_for_are_said(caplog):
    with caplog.at_level(logging.WARNING, "vllm_omni"):
        budget = plan(small_config(max_num_seqs=9), 2 * session_bytes() + workspace_bytes() + 1)
    assert budget.sessions == 2
    assert "max_num_seqs is 9 but memory admits 2 sessions at 48x32" in caplog.text


def test_no_room_for_one_session_is_an_error_with_numbers():
    with pytest.raises(OutOfKVMemoryError) as refused:
        plan(small_config(), 1000)
    words = str(refused.value)
    for part in ("KV window", "VAE histories", "the chunk being made", "activations",
                 "GiB are free", "transformer", "VAE", "text encoder",
                 "lower the size (ar_diffusion_height", "ulysses_degree",
                 "text_encoder_device: cpu"):  # fmt: skip
        assert part in words


def test_the_parts_of_the_refusal_are_the_bytes_that_are_counted():
    needs = MemoryNeeds(window=43 << 29, state=3 << 30, workspace=17 << 29, activations=2 << 30)
    assert str(needs) == (
        "35.0 GiB (KV window 21.5, prompt and VAE histories 3.0, the chunk being made 8.5, "
        "activations 2.0)"
    )
    assert (needs.total, needs.shared) == (35 << 30, 21 << 29)


def test_a_rank_that_decodes_few_columns_has_room_to_encode_whole_frames(monkeypatch):
    """Six latent columns cannot be shared evenly by four ranks, so that each encodes them all."""
    pipeline = tiny_worker().pipeline
    monkeypatch.setattr(ChunkOutput, "_slabs", 4)
    vae = pipeline.model.vae
    encoding = encoder_bytes(vae.config, vae.dtype, SMALL.height, SMALL.width).activations
    assert pipeline.activation_bytes(SMALL) == encoding
    assert encoding > decoder_bytes(vae.config, vae.dtype, SMALL.height, 16).activations


def test_without_a_size_the_default_one_is_planned_for():
    config = replace(small_config(max_num_seqs=1), geometry=None)
    spec = tiny_worker().pipeline.kv_cache_spec()
    assert plan(config).num_pages == spec.window_pages(DEFAULT_GEOMETRY.tokens_per_frame)
