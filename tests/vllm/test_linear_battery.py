"""The same questions to both implementations of the linears, on 1, 2 and 4 ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.distributed import run_ranks
from tests.helpers.linear_layers import DIM, Layers, checkpoint, tokens
from tests.vllm.installed import BACKENDS, VLLM_WARNS
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import create_linear_backend
from vllm_omni.diffusion.layers.weights import weight_targets

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, VLLM_WARNS]

TOLERANCE = {
    torch.float32: {"rtol": 0.0, "atol": 1e-5},
    # One unit in the last place is 2**-7 of a value at most; near zero the sum's own float32
    # rounding is what is left.
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 1e-5},
}


def products(state: ParallelState, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the layers of one rank make of its tokens."""
    layers = Layers(state, dtype)
    backend = create_linear_backend(
        name, {}, checkpoint=Path(), parallel=state, device=torch.device("cpu"), dtype=dtype
    )
    layers.requires_grad_(requires_grad=False)
    backend.install(layers)
    tensors, targets = checkpoint(dtype), weight_targets(layers)
    assert set(targets) == set(tensors)
    # Biases first, as a file sorted by name has them.
    for tensor_name in sorted(targets):
        target, tensor = targets[tensor_name], tensors[tensor_name]
        assert target.shape == tuple(tensor.shape)
        target.store(tensor[target.local_slices()].clone())
    backend.process(layers)
    x = tokens(dtype, state.sequence.rank)
    with torch.inference_mode():
        key_value, rest = layers.attn.qkv.forward_kv(x)
        made = {
            "qkv": layers.attn.qkv(x),
            "kv": key_value,
            "q": layers.attn.qkv.forward_q(rest),
            "local_dim": torch.tensor(layers.attn.qkv.local_dim),
            "ffn": layers.ffn(x),
            "batched": layers.ffn(x.unflatten(0, (1, 1, -1))),
            "head": layers.head(x),
        }
    backend.release()
    backend.release()
    return made


def expected(dtype: torch.dtype, *, rank: int, tp: int, sequence_rank: int) -> dict[str, Tensor]:
    """The same in float64 from whole tensors, rounded where the layers round."""
    whole = {name: tensor.double() for name, tensor in checkpoint(dtype).items()}
    x = tokens(dtype, sequence_rank).double()

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, whole[f"{name}.weight"], whole[f"{name}.bias"]).to(dtype).double()

    rows = slice(rank * DIM // tp, (rank + 1) * DIM // tp)
    q, k, v = (linear(f"attn.{part}", x)[:, rows] for part in "qkv")
    hidden = F.gelu(linear("ffn.0", x), approximate="tanh").to(dtype).double()
    ffn = linear("ffn.2", hidden)
    return {
        "qkv": torch.cat([q, k, v], dim=-1),
        "kv": torch.cat([k, v], dim=-1),
        "q": q,
        "local_dim": torch.tensor(DIM // tp),
        "ffn": ffn,
        "batched": ffn.unflatten(0, (1, 1, -1)),
        "head": linear("head", x),
    }


def check(made: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype, tp: int) -> None:
    assert set(made) == set(wanted)
    for name, value in wanted.items():
        tolerance = dict(TOLERANCE[dtype])
        if tp > 1 and name in {"ffn", "batched"} and dtype is torch.bfloat16:
            # Partial sums are rounded before ranks add them: one unit at the outputs' scale of 4.
            tolerance["atol"] = 2.0**-5
        assert made[name].dtype == (torch.int64 if name == "local_dim" else dtype)
        torch.testing.assert_close(
            made[name],
            value.to(made[name].dtype),
            **tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_one_rank(name, dtype):
    """Up to the order of sums in float32; up to one unit in bfloat16."""
    made = products(ParallelState(), name, dtype)
    check(made, expected(dtype, rank=0, tp=1, sequence_rank=0), dtype, tp=1)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("dtype", "tp", "sp"),
    [(torch.float32, 2, 1), (torch.bfloat16, 2, 1), (torch.float32, 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("name", BACKENDS)
def test_ranks_that_share_weights(name, dtype, tp, sp):
    """Up to the order of sums: each rank sums its share of the inputs, then the ranks."""
    parallel = DiffusionParallelConfig(tensor_parallel_size=tp, ulysses_degree=sp)
    made = run_ranks(products, name, dtype, parallel=parallel)
    for rank, outputs in enumerate(made):
        wanted = expected(dtype, rank=rank % tp, tp=tp, sequence_rank=rank // tp)
        check(outputs, wanted, dtype, tp)
