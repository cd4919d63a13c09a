"""8-bit linears: arithmetic, memory, one preparation for each weight, refusals."""

import pytest
import torch

from vllm_omni.diffusion.layers.linear import (
    NATIVE,
    ColumnParallelLinear,
    PlainLinearMethod,
    ReplicatedLinear,
)
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Int8Ops

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


class CountingOps(Int8Ops):
    def __init__(self):
        self.arranged = []

    def arrange_weight(self, weight, *, fractal):
        self.arranged.append((tuple(weight.shape), fractal))
        return super().arrange_weight(weight, fractal=fractal)


def filled(method, *, columns=64, rows=48, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(4)
    layer = ReplicatedLinear(columns, rows, dtype, method).requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(rows, columns, generator=generator) / columns**0.5)
    layer.bias.copy_(torch.randn(rows, generator=generator))
    return layer


def test_the_output_is_close_to_the_float_linear():
    """Lossy: about half a percent for each factor; stated as less than 2 % together."""
    plain, quantised = filled(PlainLinearMethod()), filled(
        Int8LinearMethod(Int8Ops(), fractal=True)
    )  # fmt: skip
    NATIVE.process(quantised)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    wanted, got = plain(x).float(), quantised(x).float()
    assert got.shape == (3, 5, 48)
    assert 0 < (got - wanted).norm() / wanted.norm() < 0.02


def test_each_weight_is_arranged_once_and_the_loaded_one_is_dropped():
    ops = CountingOps()
    layer = filled(Int8LinearMethod(ops, fractal=True))
    before_bytes = layer.weight.nbytes
    for _ in range(3):
        NATIVE.process(layer)
        layer(torch.ones(2, 64, dtype=torch.bfloat16))
    assert ops.arranged == [((48, 64), True)]
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    held = dict(layer.named_buffers())
    assert {name: tuple(buffer.shape) for name, buffer in held.items()} == {
        "weight_int8": (64, 48), "weight_scale": (48,),
    }  # fmt: skip
    assert held["weight_int8"].nbytes == before_bytes // 2


def test_float32_is_refused():
    with pytest.raises(ConfigError, match="needs dtype bfloat16 or float16, got"):
        filled(Int8LinearMethod(Int8Ops(), fractal=True), dtype=torch.float32)


def test_a_linear_too_wide_for_the_operator_is_refused_when_it_is_built():
    method = Int8LinearMethod(Int8Ops(), fractal=True)
    with torch.device("meta"):
        ColumnParallelLinear(65535, 8, torch.bfloat16, method)
        with pytest.raises(ConfigError, match="65536 to 8 features is too wide"):
            ColumnParallelLinear(65536, 8, torch.bfloat16, method)
