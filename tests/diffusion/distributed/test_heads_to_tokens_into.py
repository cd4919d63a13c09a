"""The exchange that writes into memory of somebody else: the leased graphs' producer.

Bitwise: it moves the same numbers as the ordinary exchange.
"""

import pytest
import torch

from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

FRAMES, HEAD_DIM, LOCAL_HEADS = 3, 4, 2
CANARY = 77.0


def heads_of(rank: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(tokens, LOCAL_HEADS, HEAD_DIM, generator=generator).bfloat16()


def exchange_both_ways(state: ParallelState) -> tuple[bool, bool, int]:
    n = state.sequence.size
    exchange, x = UlyssesExchange(state.sequence), heads_of(state.sequence.rank, FRAMES * n * 2)
    wanted = exchange.heads_to_tokens(x, latent_frames=FRAMES)
    arena = torch.full((wanted.numel() + 2 * HEAD_DIM,), CANARY, dtype=torch.bfloat16)
    target = arena[HEAD_DIM:-HEAD_DIM].view(wanted.shape)
    exchange.heads_to_tokens_into(x, target, latent_frames=FRAMES)
    canaries = torch.cat([arena[:HEAD_DIM], arena[-HEAD_DIM:]])
    untouched = bool((canaries == CANARY).all()) and torch.equal(x, heads_of(
        state.sequence.rank, FRAMES * n * 2
    ))  # fmt: skip
    return torch.equal(target, wanted), untouched, exchange.traffic.tokens.calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_ordinary_exchange_in_its_own_memory(ranks):
    results = run_ranks(exchange_both_ways, parallel=DiffusionParallelConfig(ulysses_degree=ranks))
    assert results == [(True, True, 2)] * ranks


def test_a_rank_that_is_alone_copies():
    exchange, x = UlyssesExchange(SINGLE), heads_of(0, 6)
    target = torch.empty_like(x)
    exchange.heads_to_tokens_into(x, target, latent_frames=FRAMES)
    assert torch.equal(target, x)


WRONG_TARGETS = {
    "shape": lambda x: torch.empty(x.shape[0] // 2, x.shape[1], x.shape[2], dtype=x.dtype),
    "dtype": lambda x: torch.empty(wanted_shape(x), dtype=torch.float32),
    "device": lambda x: torch.empty(wanted_shape(x), dtype=x.dtype, device="meta"),
    "strides": lambda x: torch.empty(*wanted_shape(x)[::-1], dtype=x.dtype).permute(2, 1, 0),
    "memory": lambda x: x.view(-1).view(wanted_shape(x)),
}
MESSAGES = {
    "shape": "the target must be", "dtype": "torch.float32", "device": "on meta",
    "strides": "must be contiguous", "memory": "shares memory",
}  # fmt: skip


def wanted_shape(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[0] // 2, x.shape[1] * 2, x.shape[2]


def refuse(state: ParallelState, wrong: str) -> tuple[str, int]:
    exchange, x = UlyssesExchange(state.sequence), heads_of(0, FRAMES * 4)
    try:
        exchange.heads_to_tokens_into(x, WRONG_TARGETS[wrong](x), latent_frames=FRAMES)
    except ValueError as error:
        return str(error), exchange.traffic.total.calls
    return "", exchange.traffic.total.calls


def refuse_all(state: ParallelState) -> dict[str, tuple[str, int]]:
    return {wrong: refuse(state, wrong) for wrong in WRONG_TARGETS}


def test_a_target_that_does_not_fit_is_refused_before_anything_is_exchanged():
    for results in run_ranks(refuse_all, parallel=DiffusionParallelConfig(ulysses_degree=2)):
        for wrong, (message, calls) in results.items():
            assert MESSAGES[wrong] in message
            assert calls == 0


def test_tokens_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match="7 tokens are not 3 frames"):
        UlyssesExchange(SINGLE).heads_to_tokens_into(
            heads_of(0, 7), torch.empty(7, LOCAL_HEADS, HEAD_DIM), latent_frames=FRAMES
        )
