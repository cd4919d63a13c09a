"""A linear method that holds a weight plain and in 8 bits, to tell what the bytes lose."""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod


class ComparedMode(Enum):
    """Which form is multiplied."""

    PLAIN = "plain"
    INT8 = "int8"
    BOTH = "both"
    """Both; the plain product goes on, the difference is noted."""


@dataclass(slots=True)
class SquaredError:
    """Sums over all products of one layer that were compared."""

    difference: float = 0.0
    reference: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the plain product."""
        return math.sqrt(self.difference / self.reference) if self.reference else 0.0


@dataclass(slots=True)
class ComparedLinearMethod:
    """A linear method (see ``LinearMethod``) for measuring, in one form after the other.

    Attributes:
        int8: the form that is measured.
        errors: of each layer that was compared, by identity.
    """

    int8: Int8LinearMethod
    mode: ComparedMode = ComparedMode.PLAIN
    errors: dict[int, SquaredError] = field(default_factory=dict)

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register the weight."""
        self.int8.create_weights(layer, in_features, out_features, dtype)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Add the bytes and keep the weight."""
        self.int8.add_int8_weight(layer)

    def apply(
        self, layer: nn.Module, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        """Multiply in the form that is set."""
        if self.mode is ComparedMode.INT8:
            return self.int8.apply(layer, x, bias)
        exact = F.linear(x, layer.get_parameter("weight"), bias)
        if self.mode is ComparedMode.BOTH:
            difference = self.int8.apply(layer, x, bias).float() - exact.float()
            error = self.errors.setdefault(id(layer), SquaredError())
            error.difference += float(difference.square().sum())
            error.reference += float(exact.float().square().sum())
        return exact
