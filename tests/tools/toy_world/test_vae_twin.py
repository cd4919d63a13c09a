"""The VAE's twin computes what the product's VAE computes, to float32 rounding."""

from dataclasses import asdict

import pytest
import torch

from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


@pytest.fixture(scope="module")
def twins() -> tuple[VaeTwin, WanVAE]:
    torch.manual_seed(0)
    twin = VaeTwin(VaeShape())
    for parameter in twin.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)  # leaves the neutral start
    statistics = {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    fields = asdict(VaeShape()) | statistics | {"_class_name": "AutoencoderKLWan"}
    product = WanVAE(VaeConfig.from_json(fields))
    product.load_state_dict(twin.state_dict(), strict=True)
    product.prepare()
    return twin, product


@torch.inference_mode()
def test_encoding_a_clip_equals_streaming_it_through_the_product(
    twins: tuple[VaeTwin, WanVAE],
) -> None:
    twin, product = twins
    pixels = torch.rand(1, 3, 17, 64, 96) * 2 - 1
    expected, _ = product.encode(pixels[0], EncoderState())
    torch.testing.assert_close(twin.encode(pixels)[0], expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_decoding_latents_equals_streaming_them_through_the_product(
    twins: tuple[VaeTwin, WanVAE],
) -> None:
    twin, product = twins
    latents = torch.randn(1, 16, 5, 8, 12)
    expected, _ = product.decode(latents[0], DecoderState())
    made = twin.decode(latents)[0].clamp(-1, 1)
    assert expected.abs().lt(1).float().mean() > 0.5  # the clamp hides little
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
