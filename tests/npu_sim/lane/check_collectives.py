"""Eight processes over the simulated HCCL, with the vendor's own process group between them."""

import pytest
import torch

from tests.npu_sim import collectives
from tests.npu_sim.collectives import HEADS, LATENT_FRAMES, ORDERS, counted
from tests.npu_sim.processes import TIMEOUT_S, run_ranks

pytestmark = [
    pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.npu,
    pytest.mark.timeout(TIMEOUT_S),
]  # fmt: skip

SIZE = 8


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(collectives.__name__, SIZE)


@pytest.fixture
def by_rank(ranks):
    """What every rank found under a name."""
    return lambda order, name: [rank[order][name] for rank in ranks]


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


def test_reductions(by_rank, order):
    """Bitwise: sums of these integers are exact in float32, and rounded once to bfloat16."""
    parts = torch.stack([counted(rank, SIZE, 3) for rank in range(SIZE)])
    rounded = parts.bfloat16().double().sum(0).bfloat16()
    for rank in range(SIZE):
        assert torch.equal(by_rank(order, "sum")[rank], parts.sum(0))
        assert torch.equal(by_rank(order, "sum_bf16")[rank], rounded)
        assert torch.equal(by_rank(order, "largest")[rank], parts.amax(0))


def test_gathers_and_exchanges(by_rank, order):
    parts = torch.stack([counted(rank, SIZE, 3) for rank in range(SIZE)])
    for rank in range(SIZE):
        assert torch.equal(by_rank(order, "gathered")[rank], parts.to(torch.uint8))
        assert torch.equal(by_rank(order, "exchanged")[rank], parts[:, rank])
        assert torch.equal(by_rank(order, "told")[rank], parts[-1])


def test_an_exchange_of_uneven_parts(by_rank, order):
    for rank in range(SIZE):
        wanted = [counted(peer, SIZE, peer + 1)[rank] for peer in range(SIZE)]
        assert torch.equal(by_rank(order, "uneven")[rank], torch.cat(wanted))


def test_neighbours_swap_borders_in_both_directions(by_rank, order):
    for rank in range(SIZE):
        assert torch.equal(by_rank(order, "left")[rank], counted((rank - 1) % SIZE, 5))
        assert torch.equal(by_rank(order, "right")[rank], counted((rank + 1) % SIZE, 5))


def test_the_root_gets_all_columns_by_one_batch_with_one_work(by_rank, ranks, order):
    columns = [counted(rank, 2, 3, 4).to(torch.uint8) for rank in range(SIZE)]
    assert torch.equal(by_rank(order, "pixels")[0], torch.cat(columns, 2))
    assert by_rank(order, "works") == [1] * SIZE
    assert {rank["soc"] for rank in ranks} == {"Ascend910B1"}


@pytest.mark.parametrize("turn", [0, 1])
def test_tokens_become_heads_and_come_back(by_rank, order, turn):
    """Bitwise: nothing is computed."""
    parts = torch.stack(by_rank(order, f"part{turn}"))
    tokens = parts.unflatten(1, (LATENT_FRAMES, -1)).transpose(0, 1).flatten(0, 2)
    share = HEADS // SIZE
    for rank in range(SIZE):
        mine = tokens[:, rank * share : (rank + 1) * share]
        assert torch.equal(by_rank(order, f"heads{turn}")[rank], mine)
        assert torch.equal(by_rank(order, f"back{turn}")[rank], -parts[rank])


def test_a_result_that_was_not_waited_for_is_not_there_in_late_order(by_rank):
    wanted = torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, 4)
    for order in ORDERS:
        for seen in by_rank(order, "waits True"):
            assert torch.equal(seen, wanted)
    for seen in by_rank("deferred", "waits False"):
        assert not torch.equal(seen, wanted)
