"""8-bit matrix products: what a device offers for them, and the same arithmetic in plain torch.

Symmetric and dynamic: each row is divided by ``s = max|row| / 127`` and rounded half to even; a
product of two such matrices is an exact integer, multiplied by both scales in float32.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

LARGEST_INT8 = 127


@runtime_checkable
class Int8Ops(Protocol):
    """The operators of one device.

    Attributes:
        widest: largest size of a last dimension that the operators take.
    """

    name: str
    widest: int

    def quantize_rows(
        self, x: Float[Tensor, "rows columns"]
    ) -> tuple[Int8[Tensor, "rows columns"], Float32[Tensor, " rows"]]:
        """Bytes and the scale of each row; ``x`` is float16 or bfloat16."""
        ...

    def arrange_weight(
        self, weight: Int8[Tensor, "columns inner"], *, fractal: bool
    ) -> Int8[Tensor, "inner columns"]:
        """A quantised weight as :meth:`matmul` wants it; once per weight.

        Args:
            fractal: lay it out in the device's own tiles (NZ) instead of row by row (ND).
        """
        ...

    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: Int8[Tensor, "inner columns"],
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        """``x @ weight``, scaled, plus ``bias``, rounded once to ``dtype``."""
        ...


class ReferenceInt8Ops:
    """Plain torch, for tests and for measuring quality on any device; saves memory, not time."""

    name = "reference"
    widest = 65535

    def quantize_rows(
        self, x: Float[Tensor, "rows columns"]
    ) -> tuple[Int8[Tensor, "rows columns"], Float32[Tensor, " rows"]]:
        """See :class:`Int8Ops`; a row of zeros has scale zero and stays zero."""
        wide = x.float()
        scale = wide.abs().amax(dim=-1) / LARGEST_INT8
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        quantized = (wide / divisor.unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
        return quantized.to(torch.int8), scale

    def arrange_weight(
        self, weight: Int8[Tensor, "columns inner"], *, fractal: bool
    ) -> Int8[Tensor, "inner columns"]:
        """Transpose; there are no tiles here."""
        del fractal
        return weight.t().contiguous()

    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: Int8[Tensor, "inner columns"],
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        """See :class:`Int8Ops`. Sums of byte products are exact in float64."""
        exact = (x.double() @ weight.double()).float()
        scaled = exact * column_scale * row_scale.unsqueeze(-1)
        return (scaled if bias is None else scaled + bias.float()).to(dtype)
