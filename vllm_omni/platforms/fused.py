"""Fused operators that devices offer, and the same arithmetic in plain torch.

* 8-bit matrix products, symmetric and dynamic: each row is divided by ``s = max|row| / 127`` and
  rounded half to even. The product of two such matrices is an exact integer, which is multiplied
  by both scales in float32.
* Rotary embedding: ``y = x * cos + turned(x) * sin``, where ``turned`` makes ``(-b, a)`` of each
  neighbouring pair ``(a, b)``. Both tables hold every angle twice, once for each channel of a pair.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor
from typing_extensions import override

LARGEST_INT8 = 127
QuantizedRows = tuple[Int8[Tensor, "rows columns"], Float32[Tensor, " rows"]]
"""Bytes, and one scale for each row."""
Weight = Int8[Tensor, "columns inner"]
ArrangedWeight = Int8[Tensor, "inner columns"]
Turned = Float[Tensor, "1 tokens heads head_dim"]
"""Queries or keys that a rotary operator turns."""
Angles = Float[Tensor, "1 tokens 1 head_dim"]
"""Their cosines or sines."""


@runtime_checkable
class Int8Ops(Protocol):
    """The operators of 8-bit linears on one device.

    Attributes:
        widest: largest size of a last dimension that the operators take.
    """

    name: str
    widest: int

    def quantize_rows(self, x: Float[Tensor, "rows columns"]) -> QuantizedRows:
        """Quantise a float16 or bfloat16 matrix to bytes and one scale for each row."""
        ...

    def arrange_weight(self, weight: Weight, *, fractal: bool) -> ArrangedWeight:
        """Convert a quantised weight to the layout that :meth:`matmul` expects.

        Args:
            fractal: use the device's own tiles (NZ) instead of rows (ND).
        """
        ...

    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: ArrangedWeight,
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        """Compute ``x @ weight``, scaled, plus ``bias``, and round once to ``dtype``."""
        ...


class ReferenceInt8Ops(Int8Ops):
    """The operators in plain torch, to measure quality on any device. They save no time."""

    name = "reference"
    widest = 65535

    @override
    def quantize_rows(self, x: Float[Tensor, "rows columns"]) -> QuantizedRows:
        """Give a row of zeros the scale zero; it stays zero."""
        wide = x.float()
        scale = wide.abs().amax(dim=-1) / LARGEST_INT8
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        quantized = (wide / divisor.unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
        return quantized.to(torch.int8), scale

    @override
    def arrange_weight(self, weight: Weight, *, fractal: bool) -> ArrangedWeight:
        del fractal  # there are no tiles here
        return weight.t().contiguous()

    @override
    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: ArrangedWeight,
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        # Sums of products of bytes are exact in float64.
        exact = (x.double() @ weight.double()).float()
        scaled = exact * column_scale * row_scale.unsqueeze(-1)
        return (scaled if bias is None else scaled + bias.float()).to(dtype)


MOST_HEADS = 999
"""Largest number of heads that the vendor's operator takes."""
WIDEST_HEAD = 894
"""Largest number of channels of a head that it takes."""


@runtime_checkable
class RotaryMul(Protocol):
    """The fused rotary operator of one device."""

    name: str

    def __call__(self, x: Turned, cos: Angles, sin: Angles) -> Turned:
        """Rotate neighbouring pairs of channels."""
        ...


class ReferenceRotaryMul(RotaryMul):
    """The operator in plain torch, to judge its rounding without the device. It saves no time."""

    name = "reference"

    @override
    def __call__(self, x: Turned, cos: Angles, sin: Angles) -> Turned:
        """Round every product and the sum to the dtype."""
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin
