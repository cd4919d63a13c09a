"""When the link between machines is too slow for a group of ranks, and what it carries."""

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
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

EIGHT = DiffusionParallelConfig(ulysses_degree=8)
CPU = torch.device("cpu")
PER_RANK = KVCacheSpec(
    num_layers=40, num_kv_heads=5, text_heads=5, head_dim=128, window_frames=18, sink_frames=3,
    text_tokens=512, element_bytes=2, page_tokens=128,
)  # fmt: skip
"""The real model on eight ranks."""


def real_config(parallel=EIGHT, **changes):
    return tiny_config("mp", geometry=VideoGeometry(480, 832), parallel=parallel, **changes)


def test_a_chunk_of_eight_ranks_exchanges_what_the_page_of_parallelism_derives():
    # 3.14 GB of queries, keys and values and 1.04 GB of outputs, in five forwards.
    assert link.chunk_exchange_bytes(PER_RANK, real_config()) == pytest.approx(4.18e9, rel=5e-3)
    without_commit = link.chunk_exchange_bytes(PER_RANK, real_config(reuse_last_step_kv=True))
    assert without_commit == pytest.approx(4 / 5 * 4.18e9, rel=5e-3)


def test_tensor_parallel_ranks_send_their_share_of_every_sum():
    # 4680 tokens of 5120 features in bfloat16; a ring sends 2 x 7/8 of each of four sums a layer.
    tensor = DiffusionParallelConfig(tensor_parallel_size=8)
    hidden = 4680 * 5120 * 2
    expected = 4 * 40 * 5 * hidden * 2 * 7 / 8
    assert link.chunk_sum_bytes(PER_RANK, real_config(tensor)) == expected
    both = DiffusionParallelConfig(ulysses_degree=4, tensor_parallel_size=2)
    assert link.chunk_sum_bytes(PER_RANK, real_config(both)) == 4 * 40 * 5 * hidden / 4


def test_a_link_is_too_slow_when_a_chunk_plays_sooner_than_it_is_exchanged():
    # 4.19 GB in the 0.75 s that a chunk plays at the model's 16 fps.
    sent = link.chunk_exchange_bytes(PER_RANK, real_config())
    assert slow_link("ulysses_degree", 5.7e9, sent, real_config()) is None
    said = slow_link("ulysses_degree", 2.0e9, sent, real_config())
    assert said is not None
    for part in ("not real time", "ulysses_degree", "2.00 GB/s", "2.10 s of the 0.75 s"):
        assert part in said
    assert "strict_pack" in said
    assert slow_link("ulysses_degree", 5.5e9, sent, real_config()) is not None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("group", "setting"), [("sequence", "ulysses_degree"), ("tensor", "tensor_parallel_size")]
)
def test_the_root_alone_warns(monkeypatch, caplog, rank, group, setting):
    monkeypatch.setattr(link, "measure_link", lambda *_: 1e6)
    pair = RankGroup(rank, 2, None)
    state = ParallelState(**{group: pair, "control": pair})
    config = real_config(DiffusionParallelConfig(**{setting: 2}))
    with caplog.at_level(logging.WARNING, "vllm_omni"):
        tell_slow_link(config, PER_RANK, state, CPU)
    assert [setting in record.getMessage() for record in caplog.records] == [True] * (rank == 0)


def _measured(state: ParallelState) -> float:
    return measure_link(state.sequence, CPU)


def test_two_ranks_measure_their_link():
    rates = run_ranks(_measured, parallel=DiffusionParallelConfig(ulysses_degree=2))
    assert all(1e6 < rate < 1e12 for rate in rates), rates
