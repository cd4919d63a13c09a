"""Groups of a world, what they exchange, how they agree, and that nobody waits for ever."""

import time

import pytest
import torch

from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import (
    SINGLE,
    ParallelState,
    PeerRefusedError,
    RankGroup,
    WorldPlace,
    join_world,
)
from vllm_omni.errors import OmniError, OutOfKVMemoryError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]


def place(tp: int, sp: int, rank: int = 0, **changes) -> WorldPlace:
    fields = {
        "rank": rank,
        "tensor_parallel_size": tp,
        "sequence_parallel_size": sp,
        "rendezvous": "unused",
        "backend": "gloo",
        "device": torch.device("cpu"),
        "timeout_s": 60.0,
    }
    return WorldPlace(**fields | changes)


@pytest.mark.parametrize(
    ("tp", "sp", "tensor", "sequence"),
    [
        (1, 2, [[0], [1]], [[0, 1]]),
        (2, 1, [[0, 1]], [[0], [1]]),
        (2, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (2, 4, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_groups(tp, sp, tensor, sequence):
    assert place(tp, sp).world_size == tp * sp
    assert place(tp, sp).tensor_groups() == tensor
    assert place(tp, sp).sequence_groups() == sequence


def look_around(state: ParallelState) -> dict:
    """What a rank sees of its groups."""
    rank = state.control.rank
    gathered = torch.empty(state.sequence.size, 2, 3)
    if state.sequence.group is not None:
        state.sequence.all_gather(gathered, torch.full((2, 3), float(rank)))
    return {
        "tensor": (state.tensor.rank, state.tensor.size),
        "sequence": (state.sequence.rank, state.sequence.size),
        "tensor_sum": state.tensor.all_reduce(torch.tensor([float(rank)])).item(),
        "gathered": gathered[:, 0, 0].tolist(),
        "any": (state.control.any(flag=rank == 3), state.control.any(flag=False)),
        "root": state.is_root,
        "decodes": state.decodes,
    }


def test_a_world_of_two_by_two():
    parallel = DiffusionParallelConfig(tensor_parallel_size=2, ulysses_degree=2)
    seen = run_ranks(look_around, parallel=parallel)
    assert [s["tensor"] for s in seen] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [s["sequence"] for s in seen] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [s["tensor_sum"] for s in seen] == [1, 1, 5, 5]
    assert [s["gathered"] for s in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(s["any"] == (True, False) for s in seen)
    assert [s["root"] for s in seen] == [True, False, False, False]
    assert [s["decodes"] for s in seen] == [True, False, True, False]


def confirm(state: ParallelState, refusing: set[int]) -> str:
    refusal = OutOfKVMemoryError("no pages") if state.control.rank in refusing else None
    try:
        state.control.confirm(refusal)
    except OmniError as error:
        return type(error).__name__
    return "agreed"


@pytest.mark.parametrize(
    ("refusing", "outcomes"),
    [
        (set(), ["agreed", "agreed"]),
        ({1}, ["PeerRefusedError", "OutOfKVMemoryError"]),
        ({0, 1}, ["OutOfKVMemoryError", "OutOfKVMemoryError"]),
    ],
)
def test_what_one_rank_refuses_all_refuse(refusing, outcomes):
    parallel = DiffusionParallelConfig(ulysses_degree=2)
    assert run_ranks(confirm, refusing, parallel=parallel) == outcomes


def test_a_rank_that_is_alone_agrees_with_itself():
    SINGLE.confirm(None)
    with pytest.raises(OutOfKVMemoryError):
        SINGLE.confirm(OutOfKVMemoryError("no pages"))
    assert issubclass(PeerRefusedError, OmniError)


def wait_alone(_state: ParallelState, directory: str, rank_of: dict[int, int]) -> float:
    """Meet in a second world with a short limit; then only one rank exchanges."""
    import torch.distributed as dist

    rank = rank_of[dist.get_rank()]
    dist.destroy_process_group()
    impatient = join_world(place(1, 2, rank, rendezvous=directory, timeout_s=LIMIT_S))
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            impatient.sequence.all_reduce(torch.zeros(1))
    else:
        time.sleep(LIMIT_S + 2)
    return time.monotonic() - started


LIMIT_S = 3.0


def test_nobody_waits_for_ever(tmp_path):
    parallel = DiffusionParallelConfig(ulysses_degree=2)
    waited, _ = run_ranks(wait_alone, str(tmp_path), {0: 0, 1: 1}, parallel=parallel)
    assert LIMIT_S - 0.5 < waited < LIMIT_S + 2


def test_groups_of_one_need_no_exchange():
    alone = RankGroup(0, 1, None)
    tensor = torch.ones(2)
    assert alone.all_reduce(tensor) is tensor
    assert alone.any(flag=True)
