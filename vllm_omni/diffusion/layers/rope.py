"""What tells a token what and where it is: patches of latents, timestep, rotary positions.

Rotary position embedding has three axes: latent frame, row and column of a token. Channels are
rotated in interleaved pairs (0,1), (2,3), ... The pairs are shared out over the axes temporal |
height | width; pair j of an axis turns by ``position / 10000^(2j / axis_dim)``. The rotation is
done with torch, or by a device's fused operator.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import Heads
from vllm_omni.diffusion.geometry import PATCH
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import MOST_HEADS, WIDEST_HEAD, RotaryMul, to_device


def patchify(
    x: Float[Tensor, "channels frames height width"],
) -> Float[Tensor, "frames tokens features"]:
    """Cut each frame into 2x2 patches; features are ordered (channel, row, column)."""
    channels, frames, height, width = x.shape
    patches = x.reshape(channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(
        frames, (height // PATCH) * (width // PATCH), channels * PATCH * PATCH
    )


def unpatchify(
    tokens: Float[Tensor, "frames tokens features"], rows: int, columns: int
) -> Float[Tensor, "channels frames height width"]:
    """Put 2x2 patches together; features are ordered (row, column, channel), not as above."""
    frames = tokens.shape[0]
    channels = tokens.shape[2] // (PATCH * PATCH)
    patches = tokens.reshape(frames, rows, columns, PATCH, PATCH, channels)
    return patches.permute(5, 0, 1, 3, 2, 4).reshape(
        channels, frames, rows * PATCH, columns * PATCH
    )


def timestep_sinusoid(timesteps: Float[Tensor, " rows"], dim: int) -> Float[Tensor, "rows dim"]:
    """Compute ``[cos | sin]`` of ``t * 10000^(-j / (dim / 2))`` in float64."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=timesteps.device)
    angles = torch.outer(timesteps.double(), torch.pow(10000.0, -steps / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class PatchEmbedding(nn.Module):
    """A (1, 2, 2) convolution with stride 2, computed as a matrix product over patches."""

    def __init__(self, in_channels: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, in_channels, 1, PATCH, PATCH, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, dtype=dtype))

    def forward(
        self, patches: Float[Tensor, "frames tokens features"]
    ) -> Float[Tensor, "frames tokens dim"]:
        """Project patches that :func:`patchify` has cut."""
        return F.linear(patches, self.weight.flatten(1), self.bias)


_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine of the angles of each token of a chunk, for all heads and layers.

    A table has one column per pair of channels, or the layout that a :class:`RotaryMethod` needs.
    """

    cos: Float[Tensor, "tokens columns"]
    sin: Float[Tensor, "tokens columns"]


class RotaryMethod:
    """The way in which queries and keys are rotated: by torch, which broadcasts over heads."""

    name = "broadcast"

    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """Convert the per-pair tables to the layout that :meth:`rotate` expects, once per chunk."""
        return tables

    def rotate(self, x: Heads, tables: RotaryTables) -> Heads:
        """Rotate each pair ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = tables.cos.unsqueeze(1), tables.sin.unsqueeze(1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


BROADCAST = RotaryMethod()
"""It has no state."""


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
    wide = RotaryTables(tables.cos.float(), tables.sin.float())
    wanted = BROADCAST.rotate(x.float(), wide)
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
