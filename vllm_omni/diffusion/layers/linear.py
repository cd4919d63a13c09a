"""Linear layers whose weights are shared out over the tensor-parallel ranks.

The three calls of :class:`LinearMethod` (create, process after loading, apply) are the seam for
quantisation: a method owns the representation of the weights, a layer owns the sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.layers.weights import Shard, WeightedModule, WeightTarget


@runtime_checkable
class LinearMethod(Protocol):
    """How the weights of one layer are stored and multiplied."""

    def create_weights(
        self, layer: ShardedLinear, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register ``layer.weight`` of shape ``[out_features, in_features]``."""
        ...

    def process_weights_after_loading(self, layer: ShardedLinear) -> None:
        """Rewrite the weights once, after the checkpoint has been read."""
        ...

    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        """Multiply."""
        ...


class PlainLinearMethod:
    """Weights as they are in the checkpoint, multiplied by torch."""

    def create_weights(
        self, layer: ShardedLinear, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register the weight."""
        layer.register_parameter(
            "weight", nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        )

    def process_weights_after_loading(self, layer: ShardedLinear) -> None:
        """Nothing to rewrite."""

    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        """Multiply with torch."""
        return F.linear(x, layer.weight, bias)


class ShardedLinear(WeightedModule):
    """Base of the layers: local sizes, bias and method.

    Args:
        local_in: input features on this rank.
        local_out: output features on this rank.
    """

    weight: nn.Parameter

    def __init__(
        self, local_in: int, local_out: int, dtype: torch.dtype, method: LinearMethod
    ) -> None:
        super().__init__()
        self.method = method
        method.create_weights(self, local_in, local_out, dtype)
        self.bias = nn.Parameter(torch.empty(local_out, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Multiply by this rank's weights and add this rank's bias."""
        return self.method.apply(self, x, self.bias)


class ReplicatedLinear(ShardedLinear):
    """The whole weight on every rank."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, method: LinearMethod
    ) -> None:
        super().__init__(in_features, out_features, dtype, method)
        self.shape = (out_features, in_features)

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Weight and bias as stored."""
        yield f"{prefix}weight", WeightTarget(self.weight, self.shape)
        yield f"{prefix}bias", WeightTarget(self.bias, self.shape[:1])


class ColumnParallelLinear(ShardedLinear):
    """Each rank makes some of the output features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        method: LinearMethod,
        *,
        group: RankGroup = SINGLE,
    ) -> None:
        super().__init__(in_features, out_features // group.size, dtype, method)
        self.group = group
        self.shape = (out_features, in_features)

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """This rank's rows."""
        shard = Shard.of(self.group, 0, self.shape[0])
        yield f"{prefix}weight", WeightTarget(self.weight, self.shape, shard)
        yield f"{prefix}bias", WeightTarget(self.bias, self.shape[:1], shard)


class RowParallelLinear(ShardedLinear):
    """Each rank reads some of the input features; outputs are summed over ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        method: LinearMethod,
        *,
        group: RankGroup = SINGLE,
    ) -> None:
        super().__init__(in_features // group.size, out_features, dtype, method)
        self.group = group
        self.shape = (out_features, in_features)

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Multiply, sum over ranks, then add the bias once."""
        if self.group.size == 1:
            return self.method.apply(self, x, self.bias)
        return self.group.all_reduce(self.method.apply(self, x, None)) + self.bias

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """This rank's columns; the bias is whole."""
        shard = Shard.of(self.group, 1, self.shape[1])
        yield f"{prefix}weight", WeightTarget(self.weight, self.shape, shard)
        yield f"{prefix}bias", WeightTarget(self.bias, self.shape[:1])


class QKVParallelLinear(ShardedLinear):
    """Query, key and value projections as one product; each rank makes some of the heads.

    Rows of the local weight are ordered query, key, value. The checkpoint holds three tensors
    called ``q``, ``k`` and ``v`` beside this layer.
    """

    PARTS = ("q", "k", "v")

    def __init__(
        self, dim: int, dtype: torch.dtype, method: LinearMethod, *, group: RankGroup = SINGLE
    ) -> None:
        super().__init__(dim, 3 * dim // group.size, dtype, method)
        self.group = group
        self.dim = dim

    @property
    def local_dim(self) -> int:
        """Output features of each of the three parts on this rank."""
        return self.bias.shape[0] // len(self.PARTS)

    def forward_kv(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Key and value only, for a layer whose query is never used."""
        rows = self.local_dim
        return F.linear(x, self.weight[rows:], self.bias[rows:])

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Three tensors stacked into one parameter."""
        beside = prefix.rstrip(".").rpartition(".")[0]
        shard = Shard.of(self.group, 0, self.dim)
        for index, part in enumerate(self.PARTS):
            row = index * shard.length
            name = f"{beside}.{part}." if beside else f"{part}."
            yield f"{name}weight", WeightTarget(self.weight, (self.dim, self.dim), shard, row)
            yield f"{name}bias", WeightTarget(self.bias, (self.dim,), shard, row)


def process_weights(module: nn.Module) -> None:
    """Let every linear method below ``module`` rewrite its weights after loading."""
    for layer in module.modules():
        if isinstance(layer, ShardedLinear):
            layer.method.process_weights_after_loading(layer)
