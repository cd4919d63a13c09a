"""Norms against their formulas in float64."""

import pytest
import torch

from vllm_omni.diffusion.layers.norm import AffineLayerNorm, RMSNormAcrossHeads, layer_norm

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def sample(dtype=torch.float32, scale=1.0, dim=24):
    generator = torch.Generator().manual_seed(dim)
    return ((torch.randn(5, dim, generator=generator) + 0.3) * scale).to(dtype)


def standardised(x, eps):
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_computed_and_returned_in_float32(scale, dtype):
    """Up to rounding, also where eps counts."""
    x = sample(dtype, scale)
    made = layer_norm(x, 1e-6)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), standardised(x, 1e-6), **CLOSE)


def test_affine_layer_norm_returns_the_inputs_dtype():
    norm = AffineLayerNorm(24, 1e-6, torch.bfloat16)
    norm.weight.copy_(torch.linspace(0.5, 2, 24))
    norm.bias.copy_(torch.linspace(-1, 1, 24))
    x = sample(torch.bfloat16)
    expected = standardised(x, 1e-6) * norm.weight.double() + norm.bias.double()
    made = norm(x)
    assert made.dtype == torch.bfloat16
    # One rounding to 8 bits of mantissa at the end, none before.
    torch.testing.assert_close(made.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_norm_is_over_all_heads_together(scale):
    norm = RMSNormAcrossHeads(24, 1e-6, torch.float32)
    norm.weight.copy_(torch.linspace(0.5, 2, 24))
    x = sample(scale=scale)
    wide = x.double()
    mean_square = wide.square().mean(-1, keepdim=True)
    expected = wide / (mean_square + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, **CLOSE)
    per_head = wide.unflatten(-1, (2, 12)).square().mean(-1)
    assert not torch.allclose(per_head[:, 0], per_head[:, 1])  # the inputs tell heads apart


def test_rms_norm_rounds_once():
    """Bitwise: bfloat16 in, float32 inside, one rounding out."""
    narrow, wide = (RMSNormAcrossHeads(24, 1e-6, d) for d in (torch.bfloat16, torch.float32))
    weight = torch.linspace(0.5, 2, 24).bfloat16()
    narrow.weight.copy_(weight)
    wide.weight.copy_(weight.float())
    x = sample(torch.bfloat16)
    assert torch.equal(narrow(x), wide(x.float()).bfloat16())
