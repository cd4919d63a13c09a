"""The declared split of a forward's tensors."""

import pytest
import torch

from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.distributed.sp_plan import SequencePlan
from vllm_omni.diffusion.models.lingbot_world.transformer import SEQUENCE_PLAN

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

PLAN = SequencePlan(split=frozenset({"x"}), gather=frozenset({"y"}))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_holds_its_share_of_every_frame(rank: int):
    exchange = UlyssesExchange(RankGroup(rank=rank, size=3, group=None))
    tokens = torch.arange(2.0 * 6 * 4).reshape(2, 6, 4)
    local = PLAN.split_tokens("x", tokens, exchange)
    assert torch.equal(local, tokens[:, 2 * rank : 2 * rank + 2])


def test_a_rank_that_is_alone_holds_everything():
    tokens = torch.rand(3, 4, 5)
    exchange = UlyssesExchange(SINGLE)
    assert torch.equal(PLAN.split_tokens("x", tokens, exchange), tokens)
    assert torch.equal(PLAN.gather_tokens("y", tokens, exchange), tokens)


def test_what_is_not_declared_is_refused():
    exchange = UlyssesExchange(SINGLE)
    with pytest.raises(KeyError, match="y is not split"):
        PLAN.split_tokens("y", torch.rand(1, 2, 3), exchange)
    with pytest.raises(KeyError, match="x is not gathered"):
        PLAN.gather_tokens("x", torch.rand(1, 2, 3), exchange)


def test_the_transformer_splits_what_goes_in_and_gathers_its_flow():
    assert SEQUENCE_PLAN.split == {"latent patches", "camera patches", "rotary tables"}
    assert SEQUENCE_PLAN.gather == {"flow patches"}
