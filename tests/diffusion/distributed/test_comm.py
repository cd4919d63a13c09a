"""The exchange of tokens and heads is a reordering: bitwise, for any ranks, frames and parts."""

import itertools

import pytest
import torch

from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

HEAD_DIM = 4
CASES = list(itertools.product((1, 3), (6, 12), (1, 2, 3), (torch.float32, torch.bfloat16)))
"""Latent frames, tokens per frame, parts in one message, type."""


def whole(frames: int, tokens: int, heads: int, part: int, dtype: torch.dtype) -> torch.Tensor:
    """``[frames * tokens, heads, HEAD_DIM]`` of numbers that occur once."""
    count = frames * tokens * heads * HEAD_DIM
    return (torch.arange(count).view(-1, heads, HEAD_DIM) % 251 - 7 * part).to(dtype)


def exchange_all(state: ParallelState) -> list[tuple]:
    """Every case there and back; each is run twice, on the same buffers."""
    exchange, n = UlyssesExchange(state.sequence), state.sequence.size
    heads, made = 2 * n, []
    for (frames, tokens, parts, dtype), again in itertools.product(CASES, range(2)):
        all_parts = [whole(frames, tokens, heads, part + again, dtype) for part in range(parts)]
        local = [
            exchange.plan.split(part.unflatten(0, (frames, tokens))).flatten(0, 1)
            for part in all_parts
        ]
        arrived = exchange.tokens_to_heads(*local, latent_frames=frames)
        by_heads = [part.flatten(0, -3) for part in arrived.wait()]
        back = exchange.heads_to_tokens(by_heads[0], latent_frames=frames)
        gathered = exchange.gather_tokens(local[0].flatten(1).unflatten(0, (frames, -1)))
        mine = slice(2 * state.sequence.rank, 2 * state.sequence.rank + 2)
        made.append(
            (
                all(
                    torch.equal(got, part[:, mine])
                    for got, part in zip(by_heads, all_parts, strict=True)
                ),
                torch.equal(back, local[0]),
                torch.equal(gathered.flatten(0, 1), all_parts[0].flatten(1)),
            )
        )
    return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_there_and_back(ranks):
    parallel = DiffusionParallelConfig(ulysses_degree=ranks)
    for outcomes in run_ranks(exchange_all, parallel=parallel):
        assert len(outcomes) == 2 * len(CASES)
        assert set(outcomes) == {(True, True, True)}


def test_one_rank_gets_its_own_tensors_back():
    exchange = UlyssesExchange(SINGLE)
    x = whole(3, 6, 2, 0, torch.float32)
    assert exchange.tokens_to_heads(x, latent_frames=3).wait()[0] is x
    assert exchange.heads_to_tokens(x, latent_frames=3) is x
    assert exchange.gather_tokens(x) is x
    assert exchange.traffic.total.calls == 0


def keep_results(state: ParallelState) -> bool:
    """Whether what came back to tokens is left alone by the next exchange of the same shape."""
    exchange = UlyssesExchange(state.sequence)
    x = whole(3, 2, 2, 0, torch.float32)
    first = exchange.heads_to_tokens(x, latent_frames=3)
    copy = first.clone()
    exchange.heads_to_tokens(x + 1000, latent_frames=3)
    return torch.equal(first, copy)


def meet_many_sizes(state: ParallelState) -> tuple[int, bool]:
    """Buffers held after many sizes, and whether the first size still comes out right."""
    exchange = UlyssesExchange(state.sequence)
    for local_tokens in (*range(1, 40), 1):
        x = whole(3, local_tokens, 2, state.sequence.rank, torch.float32)
        there = exchange.tokens_to_heads(x, x, latent_frames=3).wait()
        back = exchange.heads_to_tokens(there[1].flatten(0, -3), latent_frames=3)
    return len(exchange._buffers), torch.equal(back, x)


def test_ever_new_sizes_do_not_fill_the_memory():
    for held, right in run_ranks(
        meet_many_sizes, parallel=DiffusionParallelConfig(ulysses_degree=2)
    ):
        assert held == 32
        assert right


def test_what_comes_back_is_memory_of_its_own():
    assert run_ranks(keep_results, parallel=DiffusionParallelConfig(ulysses_degree=2)) == [
        True,
        True,
    ]
