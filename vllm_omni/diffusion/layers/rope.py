"""Rotary position embedding over three axes: latent frame, row and column of a token.

Channels are rotated in interleaved pairs (0,1), (2,3), ... The pairs are shared out over the
axes temporal | height | width; each axis has the angle ``position / 10000^(2j / axis_dim)``.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.platforms.transfer import to_device

_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine of each token of a chunk, shared by heads and layers.

    A table has one column per pair of channels, or what a :class:`RotaryMethod` made of it.
    """

    cos: Float[Tensor, "tokens columns"]
    sin: Float[Tensor, "tokens columns"]


@runtime_checkable
class RotaryMethod(Protocol):
    """How channels are turned on a device."""

    name: str

    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """Lay out tables of one column per pair as :meth:`rotate` wants them; once per chunk."""
        ...

    def rotate(
        self, x: Float[Tensor, "tokens heads head_dim"], tables: RotaryTables
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Turn every pair of channels by its token's angle; see :func:`apply_rotary`."""
        ...


class BroadcastRotary:
    """torch's own operators, which broadcast the tables over heads."""

    name = "broadcast"

    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """The tables as they are."""
        return tables

    def rotate(
        self, x: Float[Tensor, "tokens heads head_dim"], tables: RotaryTables
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """See :func:`apply_rotary`."""
        return apply_rotary(x, tables)


@dataclass(frozen=True, slots=True)
class RotaryEmbeddingWan:
    """Makes and applies the tables for one head size.

    Positions are computed when asked for, so a rollout has no last frame.
    """

    head_dim: int

    @property
    def axis_dims(self) -> tuple[int, int, int]:
        """Channels of the temporal, height and width axes; height and width get 2 * (d // 6)."""
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
        """Tables of all tokens of ``latent_frames`` frames in order (frame, row, column).

        Angles are float64, rounded to float32 and then to ``dtype``.
        """
        spans = (
            torch.arange(start_latent_frame, start_latent_frame + latent_frames),
            torch.arange(rows),
            torch.arange(columns),
        )
        grid = (latent_frames, rows, columns)
        parts = []
        for axis, (positions, dim) in enumerate(zip(spans, self.axis_dims, strict=True)):
            exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
            angles = torch.outer(positions.double(), 1.0 / _BASE**exponents)
            shape = [1, 1, 1, dim // 2]
            shape[axis] = grid[axis]
            parts.append(angles.reshape(shape).expand(*grid, dim // 2))
        angles = torch.cat(parts, dim=-1).reshape(-1, self.head_dim // 2)
        return RotaryTables(
            cos=to_device(angles.cos().float().to(dtype), device),
            sin=to_device(angles.sin().float().to(dtype), device),
        )


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"], tables: RotaryTables
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = tables.cos.unsqueeze(1), tables.sin.unsqueeze(1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
