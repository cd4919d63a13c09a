"""Linear layers whose weights are shared out over the tensor-parallel ranks.

Two things can be exchanged. A :class:`LinearMethod` owns the representation of the weights of one
layer, while the layer owns their sharding; that is the seam for quantisation. A
:class:`LinearBackend` replaces the layers of a finished model one by one, under the same names and
with the same checkpoint tensors; that is how vLLM's layers get in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState, RankGroup
from vllm_omni.diffusion.layers.weights import Shard, WeightedModule, WeightTarget
from vllm_omni.errors import ConfigError


class LinearMethod:
    """The way in which the weights of one layer are stored and multiplied."""

    def create_weights(
        self, layer: ShardedLinear, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register ``layer.weight`` of shape ``[out_features, in_features]``, as checkpoints do."""
        weight = torch.empty(out_features, in_features, dtype=dtype)
        layer.register_parameter("weight", nn.Parameter(weight))

    def process_weights_after_loading(self, layer: ShardedLinear) -> None:
        """Rewrite the weights once, after the checkpoint has been read."""

    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        """Compute ``x @ weight.T + bias``."""
        raise NotImplementedError


class PlainLinearMethod(LinearMethod):
    """Keeps weights as they are in the checkpoint and multiplies with torch."""

    @override
    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        return F.linear(x, layer.weight, bias)


class GeluLinearMethod(PlainLinearMethod):
    """Computes ``gelu(x @ weight.T + bias)`` in the kernel of the product, on NVIDIA GPUs alone.

    Their libraries have GELU by the hyperbolic tangent there, which is the model's. The product
    is not rounded before it, so the result is reordered beside that of two calls.
    """

    @override
    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "rows n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "rows m"]:
        product = torch.ops.aten._addmm_activation  # noqa: SLF001
        return product(bias, x, layer.weight.t(), use_gelu=True)

    @classmethod
    def where_it_is(cls, device: torch.device) -> GeluLinearMethod | None:
        """Make one for a device that has such a kernel; ``None`` for any other."""
        return cls() if device.type == "cuda" else None


class ShardedLinear(WeightedModule):
    """Base of all linear layers: it holds the bias and the method that holds the weight.

    Args:
        in_features: input features over all ranks.
        out_features: output features over all ranks.
        group: ranks that share the weight.

    Attributes:
        axis: of the weight, along which it is shared out; ``None`` if every rank has all of it.
    """

    axis: int | None = None
    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        method: LinearMethod,
        *,
        group: RankGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.method = method
        self.group = group
        self.shape = (out_features, in_features)
        local_out, local_in = (
            size // group.size if axis == self.axis else size
            for axis, size in enumerate(self.shape)
        )
        method.create_weights(self, local_in, local_out, dtype)
        self.bias = nn.Parameter(torch.empty(local_out, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Compute this rank's output features."""
        return self.method.apply(self, x, self.bias)

    @override
    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        axis = self.axis
        shard = None if axis is None else Shard.of(self.group, axis, self.shape[axis])
        yield f"{prefix}weight", WeightTarget(self.weight, self.shape, shard)
        bias_shard = shard if axis == 0 else None
        yield f"{prefix}bias", WeightTarget(self.bias, self.shape[:1], bias_shard)


class ReplicatedLinear(ShardedLinear):
    """A linear layer whose whole weight is on every rank."""


class ColumnParallelLinear(ShardedLinear):
    """A linear layer of which each rank makes some of the output features."""

    axis = 0


class RowParallelLinear(ShardedLinear):
    """A linear layer of which each rank reads some input features; outputs are summed."""

    axis = 1

    @override
    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Compute all output features; the bias is added once, after the sum over ranks."""
        if self.group.size == 1:
            return self.method.apply(self, x, self.bias)
        return self.group.all_reduce(self.method.apply(self, x, None)) + self.bias


class QKVParallelLinear(ShardedLinear):
    """Query, key and value projections as one product, of which each rank makes some heads.

    The rows of the local weight are ordered query, key, value. The checkpoint holds three tensors
    called ``q``, ``k`` and ``v`` beside this layer.
    """

    NAMES = ("q", "k", "v")
    axis = 0

    def __init__(
        self, dim: int, dtype: torch.dtype, method: LinearMethod, *, group: RankGroup = SINGLE
    ) -> None:
        super().__init__(dim, len(self.NAMES) * dim, dtype, method, group=group)
        self.dim = dim

    @property
    def local_dim(self) -> int:
        """Number of output features of each of the three projections on this rank."""
        return self.bias.shape[0] // len(self.NAMES)

    def forward_kv(
        self, x: Float[Tensor, "*batch n"]
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]:
        """Compute key and value, and return them with what :meth:`forward_q` takes."""
        rows = self.local_dim
        return F.linear(x, self.weight[rows:], self.bias[rows:]), x

    def forward_q(self, rest: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Compute the query of what :meth:`forward_kv` has left."""
        rows = self.local_dim
        return F.linear(rest, self.weight[:rows], self.bias[:rows])

    @override
    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        beside = prefix.rstrip(".").rpartition(".")[0]
        shard = Shard.of(self.group, 0, self.dim)
        for index, name in enumerate(self.NAMES):
            row = index * shard.length
            stem = f"{beside}.{name}." if beside else f"{name}."
            yield f"{stem}weight", WeightTarget(self.weight, (self.dim, self.dim), shard, row)
            yield f"{stem}bias", WeightTarget(self.bias, (self.dim,), shard, row)


class LinearBackend:
    """Decides of which layers the linears of a model are made: of those of this file."""

    def install(self, module: nn.Module) -> None:
        """Put this backend's layers into ``module``, which has memory but no values yet."""

    def process(self, module: nn.Module) -> None:
        """Let all linears rewrite their weights once, after the checkpoint has been read."""
        for layer in module.modules():
            if isinstance(layer, ShardedLinear):
                layer.method.process_weights_after_loading(layer)

    def release(self) -> None:
        """Free what outlives the modules, such as process groups. A second call does nothing."""


NATIVE = LinearBackend()
"""It has no state."""


def create_linear_backend(
    name: str,
    quantization: Mapping[str, object],
    *,
    checkpoint: Path,
    parallel: ParallelState,
    device: torch.device,
    dtype: torch.dtype,
) -> LinearBackend:
    """Make the backend called ``name``. All ranks of a world call this together.

    Args:
        quantization: method and ignored layers of vLLM's linears, empty for none.
        checkpoint: directory of the component, where a method may keep its description.

    Raises:
        ConfigError: if vLLM cannot be imported, or does not know the quantisation.
    """
    if name == "native":
        return NATIVE
    try:
        module = import_module("vllm_omni.diffusion.layers.linear_vllm")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"linear_backend {name} needs vLLM, which cannot be imported: {error}. Install it, or "
            "leave linear_backend and quantization_config out. A build of torchvision, torchaudio "
            "or torchcodec for another torch is a common cause; nothing here needs them"
        ) from error
    return module.VllmLinearBackend(
        quantization, checkpoint=checkpoint, parallel=parallel, device=device, dtype=dtype
    )
