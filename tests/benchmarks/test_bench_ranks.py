"""The benchmark of several ranks counts what the formula says."""

import pytest

from benchmarks.lingbot_world.bench_model import measure, parse_arguments
from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]


def test_exchanges_of_two_ranks():
    options = parse_arguments(
        ["--ulysses-degree", "2", "--model", str(tiny_checkpoint_dir()), "--chunks", "3",
         "--height", "64", "--width", "96"]
    )  # fmt: skip
    ranks = measure(options)["ranks"]
    assert ranks["chunks"] == 2
    assert ranks["exchanges_per_chunk"] == ranks["exchanges_per_chunk_formula"] == 47
    assert ranks["sent_bytes_per_chunk"] == ranks["sent_bytes_per_chunk_formula"] > 0
    assert 0 < ranks["exchange_share_of_transformer_time"] < 1
    assert ranks["chunk_ms"] > ranks["exchange_ms_per_chunk"] > 0
