"""How the fused norm gets into a VAE; the kernel itself is tested where Triton is."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.vae_builders import prepared, random_latents, tiny_fields, tiny_vae, tiny_weights
from vllm_omni.diffusion.models.lingbot_world.vae import vae as vae_module
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.layers import ChannelNorm
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE, fuse_norms, kernel_is_right

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def norm_silu(x, scale, target):
    normed = F.normalize(x.double(), dim=-1) * scale
    target.copy_(F.silu(normed.to(x.dtype).float()))


def half_a_percent_off(x, scale, target):
    norm_silu(x, 1.005 * scale, target)


def without_silu(x, scale, target):
    target.copy_(F.normalize(x.double(), dim=-1) * scale)


def nothing(_x, _scale, _target):
    pass


def contiguous_rows(x, scale, target):
    norm_silu(x, scale, target.as_strided(x.shape, x.stride(), 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_is_right(dtype):
    """Reordered: float64 takes the sums of another order to be exact."""
    assert kernel_is_right(norm_silu, 96, dtype, CPU)


@pytest.mark.parametrize("wrong", [without_silu, nothing, contiguous_rows])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_is_seen(wrong, dtype):
    assert not kernel_is_right(wrong, 96, dtype, CPU)


def test_half_a_percent_is_seen_in_float32():
    assert not kernel_is_right(half_a_percent_off, 96, torch.float32, CPU)


class OnGpu(WanVAE):
    """A VAE that says that it is on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("right", [True, False])
def test_a_gpu_gets_the_kernel_if_it_is_right_at_every_width(monkeypatch, right):
    vae = OnGpu(VaeConfig.from_json(tiny_fields()))
    narrow = min(vae.norm_widths())
    monkeypatch.setattr(vae_module, "import_module", lambda _: SimpleNamespace(norm_silu=norm_silu))
    monkeypatch.setattr(
        vae_module, "kernel_is_right", lambda _kernel, width, *_: right or width == narrow
    )
    assert fuse_norms(vae) is right
    assert {norm.fused for norm in vae._norms()} == {norm_silu if right else None}


def test_a_cpu_keeps_its_separate_calls():
    vae = prepared(VaeConfig.from_json(tiny_fields()), tiny_weights())
    assert fuse_norms(vae)
    assert all(norm.fused is None for norm in vae._norms())


def test_a_decode_with_the_kernel_is_the_decode_without():
    """Reordered: 2^-16 of the largest pixel over the depth of the network; every norm is fused."""
    vae, calls = prepared(VaeConfig.from_json(tiny_fields()), tiny_weights()), []

    def counted(*operands):
        calls.append(operands[0].shape)
        norm_silu(*operands)

    vae.fuse_norms(counted)
    latents = random_latents(1, 32, 48)
    with torch.inference_mode():
        pixels, _ = vae.decode(latents, DecoderState())
        wanted, _ = tiny_vae().decode(latents, DecoderState())
    before_silu = [norm for norm in vae.decoder.modules() if isinstance(norm, ChannelNorm)]
    assert len(calls) == len(before_silu) - 1  # the frame attention has no SiLU
    torch.testing.assert_close(pixels, wanted, rtol=0, atol=2**-16)
