"""When the link between machines is too slow for a Ulysses group, and what it carries."""

import logging

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState, RankGroup
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.worker import link
from vllm_omni.diffusion.worker.link import measure_link, slow_link, tell_slow_link
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import KVCacheSpec

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

EIGHT = DiffusionParallelConfig(ulysses_degree=8)
CPU = torch.device("cpu")
PER_RANK = KVCacheSpec(
    num_layers=40, num_kv_heads=5, text_heads=5, head_dim=128, window_frames=18, sink_frames=3,
    text_tokens=512, element_bytes=2, page_tokens=128,
)  # fmt: skip
"""The real model on eight ranks."""


def real_config(**changes):
    return tiny_config("mp", geometry=VideoGeometry(480, 832), parallel=EIGHT, **changes)


def test_a_chunk_of_eight_ranks_exchanges_what_the_page_of_parallelism_derives():
    # 3.14 GB of queries, keys and values and 1.04 GB of outputs, in five forwards.
    assert link.chunk_exchange_bytes(PER_RANK, real_config()) == pytest.approx(4.18e9, rel=5e-3)
    without_commit = link.chunk_exchange_bytes(PER_RANK, real_config(reuse_last_step_kv=True))
    assert without_commit == pytest.approx(4 / 5 * 4.18e9, rel=5e-3)


def test_a_link_is_too_slow_when_a_chunk_plays_sooner_than_it_is_exchanged():
    # 4.19 GB in the 0.75 s that a chunk plays at the model's 16 fps.
    assert slow_link(5.7e9, PER_RANK, real_config()) is None
    said = slow_link(2.0e9, PER_RANK, real_config())
    assert said is not None
    for part in ("not real time", "ulysses_degree 8", "2.00 GB/s", "2.10 s of the 0.75 s"):
        assert part in said
    assert "strict_pack" in said
    assert slow_link(5.5e9, PER_RANK, real_config()) is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_root_alone_warns(monkeypatch, caplog, rank):
    monkeypatch.setattr(link, "measure_link", lambda *_: 1e6)
    state = ParallelState(sequence=RankGroup(rank, 2, None), control=RankGroup(rank, 2, None))
    with caplog.at_level(logging.WARNING, "vllm_omni"):
        tell_slow_link(real_config(), PER_RANK, state, CPU)
    assert len(caplog.records) == (1 if rank == 0 else 0)


def _measured(state: ParallelState) -> float:
    return measure_link(state.sequence, CPU)


def test_two_ranks_measure_their_link():
    rates = run_ranks(_measured, parallel=DiffusionParallelConfig(ulysses_degree=2))
    assert all(1e6 < rate < 1e12 for rate in rates), rates
