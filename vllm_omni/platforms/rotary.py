"""The fused rotary operator: what a device offers, and the same arithmetic in plain torch.

``y = x * cos + turned(x) * sin``, where ``turned`` makes ``(-b, a)`` of each neighbouring pair
``(a, b)`` and both tables hold every angle twice, once for each channel of its pair.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

MOST_HEADS = 999
"""Largest number of heads that the vendor's operator takes."""
WIDEST_HEAD = 894
"""Largest number of channels of a head that it takes."""


@runtime_checkable
class RotaryMul(Protocol):
    """The operator of one device."""

    name: str

    def __call__(
        self,
        x: Float[Tensor, "1 tokens heads head_dim"],
        cos: Float[Tensor, "1 tokens 1 head_dim"],
        sin: Float[Tensor, "1 tokens 1 head_dim"],
    ) -> Float[Tensor, "1 tokens heads head_dim"]:
        """Turn neighbouring pairs of channels."""
        ...


class ReferenceRotaryMul:
    """Plain torch, so that the switch can be judged without the device; saves no time."""

    name = "reference"

    def __call__(
        self,
        x: Float[Tensor, "1 tokens heads head_dim"],
        cos: Float[Tensor, "1 tokens 1 head_dim"],
        sin: Float[Tensor, "1 tokens 1 head_dim"],
    ) -> Float[Tensor, "1 tokens heads head_dim"]:
        """See :class:`RotaryMul`; every product and the sum is rounded to the dtype."""
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin
