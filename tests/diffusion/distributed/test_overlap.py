"""Keys and values travel while the queries are made, and are read once they have come.

Bitwise: when a message arrives changes nothing, and neither do products that are made apart.
"""

import shutil
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.distributed import run_ranks
from tests.helpers.model_builders import (
    SMALL,
    SMALL_MODEL,
    ModelRollout,
    small_transformer,
    transformer_parts,
)
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import QKVParallelLinear

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

CHUNKS = 4
"""The window of nine latent frames is full after three."""
RIGHT = dist.all_to_all_single


@dataclass
class LateMessage:
    """An exchange that takes place while it is waited for, as late as it may."""

    order: list[str]
    received: Tensor
    send: Tensor
    how: dict = field(default_factory=dict)

    def wait(self):
        self.order.append("wait")
        RIGHT(self.received, self.send, **self.how).wait()


def flows(state: ParallelState) -> list[Tensor]:
    made = []
    with torch.inference_mode():
        rollout = ModelRollout(small_transformer(parallel=state))
        for chunk in range(CHUNKS):
            made.append(rollout.probe(chunk).clone())
            rollout.commit(chunk)
    return made


def watched_flows(state: ParallelState) -> tuple[list[Tensor], list[str]]:
    """Flows over late messages; what was made, sent and waited for, in this order."""
    order: list[str] = []

    def send_late(received, send, **how):
        order.append("send")
        received.fill_(torch.nan)
        return LateMessage(order, received, send, how)

    def noted(name, method):
        def call(*arguments):
            order.append(name)
            return method(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", send_late)
        for name in ("forward_kv", "forward_q"):
            patch.setattr(QKVParallelLinear, name, noted(name, vars(QKVParallelLinear)[name]))
        return flows(state), order


def test_queries_are_made_while_keys_and_values_travel():
    expected = flows(ParallelState())
    made = run_ranks(watched_flows, parallel=DiffusionParallelConfig(ulysses_degree=2))
    layers = SMALL_MODEL.num_layers
    attended = ["forward_kv", "send", "forward_q", "send", "wait", "wait", "send", "wait"]
    commit = [*(attended * (layers - 1)), "forward_kv", "send", "wait"]
    for found, order in made:
        assert order == [*(attended * layers), *commit] * CHUNKS
        assert all(map(torch.equal, found, expected))


def compiled_flows(state: ParallelState) -> tuple[list[Tensor], list[int]]:
    """Flows of compiled blocks, and the graphs that there were after each chunk."""
    from torch._dynamo.utils import counters

    made, graphs = [], []
    parts = transformer_parts(SMALL_MODEL, parallel=state).around_the_compiler()
    with torch.inference_mode():
        rollout = ModelRollout(small_transformer(parts=parts))
        rollout.model.compile_blocks(rollout.model.chunk_tokens(SMALL))
        for chunk in range(CHUNKS):
            made.append(rollout.probe(chunk).clone())
            rollout.commit(chunk)
            graphs.append(counters["stats"]["unique_graphs"])
    return made, graphs


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_ranks_are_within_1e_5_of_one_eager_rank():
    """Fused kernels round in another order. One compilation serves every chunk."""
    expected = flows(ParallelState())
    two = DiffusionParallelConfig(ulysses_degree=2)
    for made, graphs in run_ranks(compiled_flows, parallel=two, timeout_s=300.0):
        assert len(set(graphs)) == 1 <= graphs[0]
        for found, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
