"""Rotary position embedding over three axes: latent frame, row and column of a token.

Channels are rotated in interleaved pairs (0,1), (2,3), ... The pairs are shared out over the axes
temporal | height | width; pair j of an axis turns by ``position / 10000^(2j / axis_dim)``. The
rotation is done with torch, or by a device's fused operator.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import to_device
from vllm_omni.platforms.fused import MOST_HEADS, WIDEST_HEAD, RotaryMul

_BASE = 10000.0
Heads = Float[Tensor, "tokens heads head_dim"]
"""Queries or keys."""


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine of the angles of each token of a chunk, for all heads and layers.

    A table has one column per pair of channels, or the layout that a :class:`RotaryMethod` needs.
    """

    cos: Float[Tensor, "tokens columns"]
    sin: Float[Tensor, "tokens columns"]


@runtime_checkable
class RotaryMethod(Protocol):
    """The way in which queries and keys are rotated on a device."""

    name: str

    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """Convert the per-pair tables to the layout that :meth:`rotate` expects, once per chunk."""
        ...

    def rotate(self, x: Heads, tables: RotaryTables) -> Heads:
        """Rotate each pair ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
        ...


class BroadcastRotary(RotaryMethod):
    """Rotates with torch, which broadcasts the tables over heads."""

    name = "broadcast"

    @override
    def prepare(self, tables: RotaryTables) -> RotaryTables:
        return tables

    @override
    def rotate(self, x: Heads, tables: RotaryTables) -> Heads:
        return apply_rotary(x, tables)


@dataclass(frozen=True, slots=True)
class RotaryEmbeddingWan:
    """Makes the tables for one size of head.

    It computes them for any position, so a rollout may go on for ever.
    """

    head_dim: int

    @property
    def axis_dims(self) -> tuple[int, int, int]:
        """Numbers of channels of the temporal, height (2 * (d // 6)) and width (the same) axes."""
        spatial = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * spatial, spatial, spatial

    def tables(
        self,
        *,
        start_latent_frame: int,
        latent_frames: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RotaryTables:
        """Make the tables of ``latent_frames`` frames, tokens ordered (frame, row, column).

        Cosines and sines are computed in float64, rounded to float32 and then to ``dtype``.
        """
        spans = (
            torch.arange(start_latent_frame, start_latent_frame + latent_frames),
            torch.arange(rows),
            torch.arange(columns),
        )
        grid = (latent_frames, rows, columns)
        per_axis = []
        for axis, (positions, dim) in enumerate(zip(spans, self.axis_dims, strict=True)):
            exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
            angles = torch.outer(positions.double(), 1.0 / _BASE**exponents)
            shape = [1, 1, 1, dim // 2]
            shape[axis] = grid[axis]
            per_axis.append(angles.reshape(shape).expand(*grid, dim // 2))
        angles = torch.cat(per_axis, dim=-1).reshape(-1, self.head_dim // 2)
        return RotaryTables(
            cos=to_device(angles.cos().float().to(dtype), device),
            sin=to_device(angles.sin().float().to(dtype), device),
        )


def apply_rotary(x: Heads, tables: RotaryTables) -> Heads:
    """Rotate each pair ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = tables.cos.unsqueeze(1), tables.sin.unsqueeze(1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


_LATE_LATENT_FRAME = 1021
_FRAMES, _ROWS, _COLUMNS = 3, 2, 3
_HEADS = 2


class FusedRotary(RotaryMethod):
    """Rotates each tensor with one call of a device's operator.

    Args:
        heads: largest number of heads of a tensor.
        head_dim: channels of a head.

    Raises:
        ConfigError: if the operator does not take such tensors.
    """

    def __init__(self, operator: RotaryMul, *, heads: int, head_dim: int) -> None:
        if heads > MOST_HEADS or head_dim > WIDEST_HEAD:
            raise ConfigError(
                f"lingbot_npu_rotary_mul takes up to {MOST_HEADS} heads of {WIDEST_HEAD} channels, "
                f"this model has {heads} of {head_dim}; leave it out"
            )
        self._operator = operator
        self.name = f"npu_rotary_mul ({operator.name})"

    @override
    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """Make tables of ``head_dim`` columns, which hold every angle twice."""
        return RotaryTables(cos=_twice(tables.cos), sin=_twice(tables.sin))

    @override
    def rotate(self, x: Heads, tables: RotaryTables) -> Heads:
        cos, sin = (table.unsqueeze(0).unsqueeze(2) for table in (tables.cos, tables.sin))
        return self._operator(x.unsqueeze(0), cos, sin).squeeze(0)


def check_rotary(
    method: RotaryMethod, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rotate a small random case, late in a rollout, and compare it with float32 on the host.

    Raises:
        ConfigError: if the result is further away than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = _FRAMES * _ROWS * _COLUMNS
    x = torch.randn(tokens, _HEADS, head_dim, generator=generator).to(dtype)
    tables = RotaryEmbeddingWan(head_dim).tables(
        start_latent_frame=_LATE_LATENT_FRAME,
        latent_frames=_FRAMES,
        rows=_ROWS,
        columns=_COLUMNS,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    wanted = apply_rotary(x.float(), RotaryTables(tables.cos.float(), tables.sin.float()))
    there = method.prepare(RotaryTables(tables.cos.to(device), tables.sin.to(device)))
    got = method.rotate(x.to(device), there).cpu().float()
    # Rounding both products moves the result by eps / 2 of |a| + |b| <= 2 max|x|, rounding the sum
    # by eps / 2 of at most sqrt(2) max|x|.
    allowed = 2 * torch.finfo(dtype).eps * float(x.float().abs().max())
    worst = float((got - wanted).abs().max())
    if not worst <= allowed:
        raise ConfigError(
            f"{method.name} is wrong on {device}: off torch's own rotary embedding by "
            f"{worst:.3g}, rounding to {dtype} allows {allowed:.3g}; set lingbot_npu_rotary_mul: "
            "false"
        )


def _twice(table: Float[Tensor, "tokens half_dim"]) -> Float[Tensor, "tokens head_dim"]:
    return torch.stack((table, table), dim=-1).flatten(-2)
