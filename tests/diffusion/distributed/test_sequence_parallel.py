"""Worlds of several ranks make the rollout of one rank.

Bitwise, in eager float32: sharing out tokens and heads moves numbers and adds none up in another
order.
"""

import functools
from dataclasses import replace

import pytest
import torch

from benchmarks.lingbot_world.roofline_counts import VARIANTS, chunk_exchange, read_model
from tests.helpers.distributed import run_ranks
from tests.helpers.mark import advanced
from tests.helpers.rollouts import NUM_CHUNKS, RankRollout, roll
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_config
from tests.helpers.watched_rollouts import WATCHED_CHUNKS, ShapeGuard, roll_watched
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import OutputKind

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

TRIMMED = next(variant for variant in VARIANTS if variant.key == "D")


@functools.cache
def alone(size: VideoGeometry, dtype: str = "float32") -> RankRollout:
    """The rollout of one rank."""
    return roll(ParallelState(), tiny_config(geometry=size, dtype=dtype))


@functools.cache
def together(tp: int, sp: int, size: VideoGeometry, dtype: str = "float32") -> list[RankRollout]:
    """The rollouts of all ranks of a world."""
    parallel = DiffusionParallelConfig(tensor_parallel_size=tp, ulysses_degree=sp)
    config = tiny_config("mp", parallel=parallel, geometry=size, dtype=dtype)
    return run_ranks(roll, config, parallel=parallel)


SMALL, WIDE = VideoGeometry(64, 96), VideoGeometry(96, 160)


@pytest.mark.parametrize(
    ("ranks", "size"),
    [(2, SMALL), advanced(4, SMALL), advanced(2, WIDE), advanced(4, WIDE)],
)
def test_rollout_is_bitwise_that_of_one_rank(ranks, size):
    expected, made = alone(size), together(1, ranks, size)
    for rank, rollout in enumerate(made):
        assert len(rollout.outputs) == (NUM_CHUNKS if rank == 0 else 0)
        for latents, single in zip(rollout.outputs, expected.outputs, strict=rank == 0):
            assert torch.equal(latents, single)
        for (key, value), (whole_key, whole_value) in zip(
            rollout.window, expected.window, strict=True
        ):
            heads = slice(rank * key.shape[1], (rank + 1) * key.shape[1])
            assert torch.equal(key, whole_key[:, heads])
            assert torch.equal(value, whole_value[:, heads])
        for mine, single in zip(rollout.text, expected.text, strict=True):
            # Cross-attention exchanges nothing: every rank keeps all heads of the prompt.
            assert torch.equal(mine[0], single[0])
            assert torch.equal(mine[1], single[1])
        assert rollout.free_pages == expected.free_pages


@pytest.mark.advanced_model
def test_bf16_is_within_the_spread_of_two_attention_orders():
    """Lossy by nature: rounding to bf16 makes the order of sums visible.

    The spread is measured: the same rollout on one rank, attention summed by the fused kernel
    and by the float32 oracle. Twice the spread is allowed, since either may be off to one side.
    """
    config = tiny_config(dtype="bfloat16")
    other = roll(ParallelState(), replace(config, attention_backend="reference"))
    expected = alone(SMALL, "bfloat16")
    made = together(1, 4, SMALL, "bfloat16")
    spread = largest_difference(other, expected)
    print(
        f"spread of two orders {spread:.3g}, four ranks {largest_difference(made[0], expected):.3g}"
    )
    assert spread > 0
    assert largest_difference(made[0], expected) <= spread


def largest_difference(one: RankRollout, other: RankRollout) -> float:
    pairs = zip(one.outputs, other.outputs, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("ranks", [2, advanced(4)])
def test_collectives_and_their_bytes_are_the_formula(ranks):
    """Of the transformer: each rank encodes whole frames."""
    parallel = DiffusionParallelConfig(ulysses_degree=ranks)
    config = tiny_config("mp", parallel=parallel, vae_spatial_sharding=False)
    made = run_ranks(roll_watched, config, OutputKind.LATENT, parallel=parallel)
    model = replace(
        read_model(
            tiny_checkpoint_dir() / "transformer" / "config.json",
            height=SMALL.height, width=SMALL.width,
        ),
        element_bytes=4,
    )  # fmt: skip
    formula = chunk_exchange(model, ranks, TRIMMED)
    layers = model.layers
    assert formula.calls == 4 * (3 * layers + 1) + 3 * layers - 2
    for watched in made:
        exchanged = watched.sent["all_to_all_single"]
        gathered = watched.sent["gather"]
        assert len(exchanged) + len(gathered) == WATCHED_CHUNKS * formula.calls
        assert sum(exchanged) == WATCHED_CHUNKS * (formula.qkv_bytes + formula.out_bytes)
        assert sum(gathered) == WATCHED_CHUNKS * formula.head_bytes
        traffic = watched.rollout.traffic
        assert traffic.total.calls == WATCHED_CHUNKS * formula.calls
        assert traffic.heads.sent_bytes == WATCHED_CHUNKS * formula.qkv_bytes
        assert traffic.tokens.sent_bytes == WATCHED_CHUNKS * formula.out_bytes
        assert traffic.gather.sent_bytes == WATCHED_CHUNKS * formula.head_bytes
        # Ranks agree once to open and once per chunk, four bytes each. Nothing else is exchanged.
        assert watched.sent["all_reduce"] == [4] * (1 + WATCHED_CHUNKS)
        assert "batch_isend_irecv" not in watched.sent


def test_no_tensor_holds_modulation_per_token():
    parallel = DiffusionParallelConfig(ulysses_degree=2)
    # Wide: six latent columns a rank would look like six rows of modulation.
    config = tiny_config("mp", parallel=parallel, geometry=WIDE)
    watched = run_ranks(roll_watched, config, OutputKind.LATENT, parallel=parallel)[0]
    assert watched.guarded > 1000
    assert watched.modulation_shapes == []


def test_the_guard_finds_modulation_per_token():
    with ShapeGuard(dim=8) as guard:
        torch.zeros(3, 6, 8)
        torch.zeros(5, 6, 8)
        torch.zeros(5, 48)
    assert guard.found == [(5, 6, 8), (5, 48)]


@pytest.mark.parametrize(
    ("tp", "sp"),
    [(2, 1), advanced(2, 2), advanced(4, 1)],
)
def test_tensor_parallel_is_within_1e_5_of_one_rank(tp, sp):
    """Up to reordering: sums over ranks add partial sums; 1e-5 on latents of unit scale."""
    expected, made = alone(SMALL), together(tp, sp, SMALL)
    difference = largest_difference(made[0], expected)
    print(f"TP{tp} x SP{sp}: largest difference {difference:.3g}")
    assert difference <= 1e-5
    spec_heads = 4
    for rank, rollout in enumerate(made):
        tensor_rank, sequence_rank = rank % tp, rank // tp
        per_rank = spec_heads // (tp * sp)
        first = tensor_rank * (spec_heads // tp) + sequence_rank * per_rank
        for mine, whole in zip(rollout.window, expected.window, strict=True):
            for part, full in zip(mine, whole, strict=True):
                expected_part = full[:, first : first + per_rank]
                torch.testing.assert_close(part, expected_part, rtol=0, atol=1e-5)
        text_heads = slice(tensor_rank * spec_heads // tp, (tensor_rank + 1) * spec_heads // tp)
        for mine, whole in zip(rollout.text, expected.text, strict=True):
            torch.testing.assert_close(mine[0], whole[0][:, text_heads], rtol=0, atol=1e-5)
