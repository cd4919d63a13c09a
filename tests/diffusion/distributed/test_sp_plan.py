"""Which tokens a rank holds, and how the shares of all ranks come together."""

import pytest
import torch

from vllm_omni.diffusion.distributed.comm import SequencePlan

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SIZE = 3
TOKENS = torch.arange(2.0 * 6 * 4).reshape(2, 6, 4)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_holds_its_share_of_every_frame(rank: int):
    plan = SequencePlan(rank, SIZE)
    assert torch.equal(plan.split(TOKENS), TOKENS[:, 2 * rank : 2 * rank + 2])
    assert plan.local_count(12) == plan.split(TOKENS).shape[:2].numel()


def test_the_shares_of_all_ranks_are_the_whole():
    shares = torch.stack([SequencePlan(rank, SIZE).split(TOKENS) for rank in range(SIZE)])
    assert torch.equal(SequencePlan(1, SIZE).join(shares), TOKENS)


def test_a_rank_that_is_alone_holds_everything():
    assert torch.equal(SequencePlan(0, 1).split(TOKENS), TOKENS)
