"""Rotary embedding by a fused operator: its tables, its limits, the check before serving."""

import pytest
import torch

from vllm_omni.diffusion.layers.rope import (
    BROADCAST,
    FusedRotary,
    RotaryEmbeddingWan,
    RotaryTables,
    check_rotary,
)
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import RotaryMul
from vllm_omni.platforms.cuda import CudaPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(heads=4, head_dim=16, operator=None):
    return FusedRotary(operator or RotaryMul(), heads=heads, head_dim=head_dim)


def tables(head_dim, dtype):
    return RotaryEmbeddingWan(head_dim).tables(
        start_latent_frame=7, latent_frames=3, rows=2, columns=3, dtype=dtype, device=CPU
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 6), (4, 16), (40, 128)])
def test_it_gives_the_bits_of_broadcast_tables(heads, head_dim, dtype):
    """Bitwise: the same two products and one sum, whose terms may change places."""
    x = torch.randn(18, heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    made, plain, method = tables(head_dim, dtype), BROADCAST, fused(heads, head_dim)
    expected = plain.rotate(x, plain.prepare(made))
    assert torch.equal(method.rotate(x, method.prepare(made)), expected)


def test_tables_hold_every_angle_twice_side_by_side():
    prepared = fused().prepare(RotaryTables(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])))
    assert prepared.cos.tolist() == [[1.0, 1.0, 2.0, 2.0]]
    assert prepared.sin.tolist() == [[3.0, 3.0, 4.0, 4.0]]


@pytest.mark.parametrize(("heads", "head_dim"), [(1000, 16), (4, 896)])
def test_a_model_that_the_operator_does_not_take_is_refused(heads, head_dim):
    with pytest.raises(ConfigError, match=rf"this model has {heads} of {head_dim}; leave it out"):
        fused(heads, head_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_the_check_passes_a_right_operator(head_dim, dtype):
    method = fused(head_dim=head_dim)
    check_rotary(method, head_dim=head_dim, dtype=dtype, device=CPU)


class Halves(RotaryMul):
    """Pairs the same place of both halves."""

    def __call__(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin


class Backwards(RotaryMul):
    """Turns the other way."""

    def __call__(self, x, cos, sin):
        return super().__call__(x, cos, -sin)


class Imprecise(RotaryMul):
    """Off by three roundings of the largest value."""

    def __call__(self, x, cos, sin):
        return super().__call__(x, cos, sin) + 3 * torch.finfo(x.dtype).eps * x.abs().max()


class NotANumber(RotaryMul):
    """Has an output that no limit compares with."""

    def __call__(self, x, cos, sin):
        return super().__call__(x, cos, sin) * torch.nan


@pytest.mark.parametrize("wrong", [Halves, Backwards, Imprecise, NotANumber])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_refuses_a_wrong_operator(wrong, dtype):
    with pytest.raises(ConfigError, match="set lingbot_npu_rotary_mul: false"):
        check_rotary(fused(operator=wrong()), head_dim=16, dtype=dtype, device=CPU)


def test_gpus_have_no_such_operator():
    with pytest.raises(ConfigError, match="operator for device npu and a reference for cpu"):
        CudaPlatform().rotary_mul()
