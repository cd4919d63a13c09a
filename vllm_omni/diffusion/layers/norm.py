"""Normalisations that compute in float32 and return the input's dtype."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.layers.weights import Shard, WeightedModule, WeightTarget


def layer_norm(
    x: Float[Tensor, "*batch dim"],
    eps: float,
    weight: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, "*batch dim"]:
    """Normalise over the last axis in float32 and return float32."""
    return F.layer_norm(
        x.float(),
        x.shape[-1:],
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
        eps,
    )


class AffineLayerNorm(nn.Module):
    """Layer normalisation with a weight and a bias."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Normalise in float32 and return ``x.dtype``."""
        return layer_norm(x, self.eps, self.weight, self.bias).to(x.dtype)


class RMSNormAcrossHeads(WeightedModule):
    """Root-mean-square norm over all heads together: ``x / sqrt(mean(x²) + eps) * weight``.

    Under tensor parallelism each rank holds some heads and the sum of squares is all-reduced.

    Args:
        dim: number of channels of all heads on all ranks.
    """

    def __init__(
        self, dim: int, eps: float, dtype: torch.dtype, *, tensor_parallel: RankGroup = SINGLE
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.group = tensor_parallel
        self.weight = nn.Parameter(torch.empty(dim // tensor_parallel.size, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch local_dim"]) -> Float[Tensor, "*batch local_dim"]:
        """Divide first and multiply second, in this order, which decides the rounding."""
        wide = x.float()
        square_sum = self.group.all_reduce(wide.square().sum(dim=-1, keepdim=True))
        return (wide / torch.sqrt(square_sum / self.dim + self.eps) * self.weight.float()).to(
            x.dtype
        )

    @override
    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        shard = Shard.of(self.group, 0, self.dim)
        yield f"{prefix}weight", WeightTarget(self.weight, (self.dim,), shard)
