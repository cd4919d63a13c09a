"""One linear of each kind, with weights under the names of a checkpoint and tokens to multiply."""

import torch
from torch import Tensor, nn

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import (
    ColumnParallelLinear,
    PlainLinearMethod,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

DIM, WIDE, TOKENS = 64, 160, 37


class Layers(nn.Module):
    """One of each kind, with the names that the checkpoint has."""

    def __init__(self, state: ParallelState, dtype: torch.dtype) -> None:
        super().__init__()
        method, group = PlainLinearMethod(), state.tensor
        self.attn = nn.Module()
        self.attn.qkv = QKVParallelLinear(DIM, dtype, method, group=group)
        self.ffn = nn.Sequential(
            ColumnParallelLinear(DIM, WIDE, dtype, method, group=group),
            nn.GELU(approximate="tanh"),
            RowParallelLinear(WIDE, DIM, dtype, method, group=group),
        )
        self.head = ReplicatedLinear(DIM, 48, dtype, method)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def checkpoint(dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole tensors of unit scale outputs, under the names of a checkpoint."""
    shapes = {f"attn.{part}": (DIM, DIM) for part in "qkv"}
    shapes |= {"ffn.0": (WIDE, DIM), "ffn.2": (DIM, WIDE), "head": (48, DIM)}
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        tensors[f"{name}.weight"] = (draw(*shape, seed=seed) * shape[1] ** -0.5).to(dtype)
        tensors[f"{name}.bias"] = draw(shape[0], seed=100 + seed).to(dtype)
    return tensors


def tokens(dtype: torch.dtype, sequence_rank: int) -> Tensor:
    """Other tokens on each sequence-parallel rank, the same on all that share weights."""
    return draw(TOKENS, DIM, seed=1000 + sequence_rank).to(dtype)
