"""Rotary embedding by a device's fused operator, and the comparison that it has to pass first."""

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.layers.rope import (
    RotaryEmbeddingWan,
    RotaryMethod,
    RotaryTables,
    apply_rotary,
)
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.rotary import MOST_HEADS, WIDEST_HEAD, RotaryMul

_LATE_LATENT_FRAME = 1021
_FRAMES, _ROWS, _COLUMNS = 3, 2, 3
_HEADS = 2


class FusedRotary:
    """A rotary method (see ``RotaryMethod``) of one operator for each tensor.

    Args:
        operator: the device's.
        heads: most heads that a tensor has.
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

    def prepare(self, tables: RotaryTables) -> RotaryTables:
        """Tables of ``head_dim`` columns, every angle twice."""
        return RotaryTables(cos=_twice(tables.cos), sin=_twice(tables.sin))

    def rotate(
        self, x: Float[Tensor, "tokens heads head_dim"], tables: RotaryTables
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """One call of the operator, which broadcasts the tables over heads."""
        cos, sin = (table.unsqueeze(0).unsqueeze(2) for table in (tables.cos, tables.sin))
        return self._operator(x.unsqueeze(0), cos, sin).squeeze(0)


def check_rotary(
    method: RotaryMethod, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Turn a small random case, late in a rollout, and compare with float32 on the host.

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
