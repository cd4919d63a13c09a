"""8-bit products in plain torch: exact sums, the claimed error, corner cases."""

import pytest
import torch

from vllm_omni.platforms.base import Int8Ops

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

OPS = Int8Ops()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_divided_by_their_own_largest_value_and_rounded_half_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0, 0.0, 0.0, 0.0, 0.0],
                      [2.0, -1.0, 1.0, 0.0, 2.0]]).bfloat16()  # fmt: skip
    quantised, scale = OPS.quantize_rows(x)
    assert quantised.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [127, -64, 64, 0, 127]]
    assert scale.tolist() == [1.0, 0.0, pytest.approx(2 / 127)]
    assert (quantised.dtype, scale.dtype) == (torch.int8, torch.float32)


@pytest.mark.parametrize("inner", [64, 13824])
def test_products_of_bytes_are_summed_exactly(inner):
    """Bitwise with integers, at the width of the model too, where float32 sums would round."""
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randint(-127, 128, (4, inner), generator=generator).to(torch.int8)
            for _ in range(2))  # fmt: skip
    wanted = x.long() @ w.long().t()
    ones = torch.ones(4)
    got = OPS.matmul(x, OPS.arrange_weight(w, fractal=True), row_scale=ones, column_scale=ones,
                     bias=None, dtype=torch.float32)  # fmt: skip
    assert torch.equal(got, wanted.to(torch.float32))


def test_the_error_of_a_product_is_what_rounding_to_steps_explains():
    """Lossy: each factor is off by half a step at most, so |error| <= sum of the bounds."""
    x, w = draw(8, 256).bfloat16(), draw(16, 256, seed=1).bfloat16()
    x8, x_scale = OPS.quantize_rows(x)
    w8, w_scale = OPS.quantize_rows(w)
    got = OPS.matmul(x8, OPS.arrange_weight(w8, fractal=False), row_scale=x_scale,
                     column_scale=w_scale, bias=None, dtype=torch.float32)  # fmt: skip
    wide_x, wide_w = x.double(), w.double()
    half_x, half_w = x_scale.double()[:, None] / 2, w_scale.double()[None, :] / 2
    bound = (
        half_x * wide_w.abs().sum(1)[None, :]
        + half_w * wide_x.abs().sum(1)[:, None]
        + 256 * half_x * half_w
    )
    error = (got.double() - wide_x @ wide_w.t()).abs()
    assert (error <= bound * (1 + 1e-6)).all()
    relative = error.norm() / (wide_x @ wide_w.t()).norm()
    assert 0.001 < relative < 0.02


def test_the_bias_is_added_before_the_only_rounding():
    x8, w8 = torch.ones(1, 4, dtype=torch.int8), torch.ones(4, 1, dtype=torch.int8)
    got = OPS.matmul(x8, w8, row_scale=torch.tensor([1 / 1024]), column_scale=torch.ones(1),
                     bias=torch.tensor([1.0]).bfloat16(), dtype=torch.bfloat16)  # fmt: skip
    assert got.item() == torch.tensor(1.0 + 4 / 1024).bfloat16().item()
