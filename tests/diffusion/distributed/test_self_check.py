"""The check of the exchange at start: a right one passes on every rank, wrong ones are refused."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange, check_exchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState
from vllm_omni.errors import ConfigError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

CPU = torch.device("cpu")
RIGHT = dist.all_to_all_single


def zeros(received, send, **how):
    work = RIGHT(torch.empty_like(received), send, **how)
    received.zero_()
    return work


def echo(received, send, **how):
    work = RIGHT(torch.empty_like(received), send, **how)
    received.copy_(send)
    return work


LIBRARIES = {"right": RIGHT, "zeros": zeros, "echo": echo}


def check_all(state: ParallelState) -> dict[str, str]:
    outcomes = {}
    for name, library in LIBRARIES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", library)
            exchange = UlyssesExchange(state.sequence)
            try:
                check_exchange(exchange, dtype=torch.bfloat16, device=CPU)
                outcomes[name] = "passed"
            except ConfigError as error:
                outcomes[name] = str(error)
    return outcomes


def test_wrong_exchanges_are_refused_on_every_rank():
    for outcomes in run_ranks(check_all, parallel=DiffusionParallelConfig(ulysses_degree=4)):
        assert outcomes["right"] == "passed"
        for wrong in ("zeros", "echo"):
            assert "exchange between 4 ranks is wrong on cpu" in outcomes[wrong]


def test_a_rank_that_is_alone_exchanges_nothing():
    exchange = UlyssesExchange(SINGLE)
    check_exchange(exchange, dtype=torch.float32, device=CPU)
    assert exchange.traffic.total.calls == 0
