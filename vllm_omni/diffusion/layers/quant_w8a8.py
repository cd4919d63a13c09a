"""Linears in 8 bits: weights by output channel, activations by token, both while the model runs.

``y = (x8 @ w8) * s_token * s_channel + bias`` with ``w8 = round(w / s_channel)``. What a product
loses is measured by ``python -m vllm_omni.tools.quant_report``.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from vllm_omni.diffusion.layers.linear import LinearMethod, ShardedLinear
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Int8Ops

_DTYPES = (torch.float16, torch.bfloat16)


class Int8LinearMethod(LinearMethod):
    """Replaces each weight by bytes and scales, and multiplies in 8 bits.

    Args:
        ops: operators of the device.
        fractal: keep weights in the device's own tiles.
    """

    def __init__(self, ops: Int8Ops, *, fractal: bool) -> None:
        self.ops = ops
        self.fractal = fractal

    @override
    def create_weights(
        self, layer: ShardedLinear, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register the weight as it is in the checkpoint; it is quantised after loading.

        Raises:
            ConfigError: if the operators take neither the dtype nor the size.
        """
        if dtype not in _DTYPES:
            raise ConfigError(
                f"lingbot_npu_quant: w8a8 needs dtype bfloat16 or float16, got {dtype}"
            )
        widest = max(in_features, out_features)
        if widest > self.ops.widest:
            raise ConfigError(
                f"a linear of {in_features} to {out_features} features is too wide for w8a8, "
                f"which takes {self.ops.widest}; leave lingbot_npu_quant out or raise "
                "tensor_parallel_size"
            )
        super().create_weights(layer, in_features, out_features, dtype)

    @override
    def process_weights_after_loading(self, layer: ShardedLinear) -> None:
        """Quantise and arrange the weight, then drop the loaded one. A second call does nothing."""
        if "weight_int8" in dict(layer.named_buffers(recurse=False)):
            return
        self.add_int8_weight(layer)
        del layer.weight

    def add_int8_weight(self, layer: ShardedLinear) -> None:
        """Add buffers ``weight_int8`` ``[in, out]`` and ``weight_scale`` ``[out]`` to the layer."""
        rows, scale = self.ops.quantize_rows(layer.get_parameter("weight").detach())
        arranged = self.ops.arrange_weight(rows, fractal=self.fractal)
        layer.register_buffer("weight_int8", arranged, persistent=False)
        layer.register_buffer("weight_scale", scale, persistent=False)

    @override
    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        tokens, token_scale = self.ops.quantize_rows(x.reshape(-1, x.shape[-1]))
        product = self.ops.matmul(
            tokens,
            layer.get_buffer("weight_int8"),
            row_scale=token_scale,
            column_scale=layer.get_buffer("weight_scale"),
            bias=bias,
            dtype=x.dtype,
        )
        return product.reshape(*x.shape[:-1], product.shape[-1])


class ComparedMode(Enum):
    """Selects the form of the weight that is multiplied."""

    PLAIN = "plain"
    INT8 = "int8"
    BOTH = "both"
    """Multiply both, note the difference, and go on with the plain product."""


@dataclass(slots=True)
class SquaredError:
    """Sums of squares over all compared products of one layer."""

    difference: float = 0.0
    reference: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the norm of the plain product."""
        return math.sqrt(self.difference / self.reference) if self.reference else 0.0


@dataclass(slots=True)
class ComparedLinearMethod(LinearMethod):
    """Holds each weight plain and in 8 bits, to measure what a model loses by the bytes.

    Attributes:
        int8: the method that is measured.
        errors: error of each layer that was compared, by the identity of the layer.
    """

    int8: Int8LinearMethod
    mode: ComparedMode = ComparedMode.PLAIN
    errors: dict[int, SquaredError] = field(default_factory=dict)

    @override
    def create_weights(
        self, layer: ShardedLinear, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        self.int8.create_weights(layer, in_features, out_features, dtype)

    @override
    def process_weights_after_loading(self, layer: ShardedLinear) -> None:
        """Add the bytes beside the weight, which is kept."""
        self.int8.add_int8_weight(layer)

    @override
    def apply(
        self, layer: ShardedLinear, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        if self.mode is ComparedMode.INT8:
            return self.int8.apply(layer, x, bias)
        exact = F.linear(x, layer.get_parameter("weight"), bias)
        if self.mode is ComparedMode.BOTH:
            difference = self.int8.apply(layer, x, bias).float() - exact.float()
            error = self.errors.setdefault(id(layer), SquaredError())
            error.difference += float(difference.square().sum())
            error.reference += float(exact.float().square().sum())
        return exact
