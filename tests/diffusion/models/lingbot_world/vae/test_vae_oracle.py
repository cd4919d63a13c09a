"""Our VAE beside diffusers' class, and beside the golden streams.

Equality is up to reordering: channels-last kernels sum in another order. Differences grow over
some forty layers from 1e-7 to a few 1e-6 at values of order one, hence 1e-5, absolute and relative.
"""

import time

import pytest
import torch

from tests.helpers.golden import assert_matches, load_set, requires_golden
from tests.helpers.mark import advanced
from tests.helpers.vae_builders import (
    decode_in_calls,
    encode_in_calls,
    random_latents,
    random_pair,
    random_pixels,
    tiny_oracle,
    tiny_vae,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_uint8
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# The tiny checkpoint's last encoder layer has a gain of four: moments are up to eight.
MOMENTS_TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}
SIZES = [
    (32, 32),
    (48, 80),
    *(advanced(size) for size in [(96, 64), (16, 112)]),
]
# Norms over fewer channels than eight amplify rounding beyond any fixed tolerance.
RANDOM = {
    "shallow": {"base_dim": 8, "num_res_blocks": 1},
    "other-times": {"base_dim": 8, "dim_mult": (2, 1, 2, 3),
                    "temperal_downsample": (True, True, False)},
    "wide-decoder": {"base_dim": 8, "decoder_base_dim": 12, "num_res_blocks": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(params=["tiny", *RANDOM])
def pair(request: pytest.FixtureRequest) -> tuple[WanVAE, torch.nn.Module]:
    if request.param == "tiny":
        return tiny_vae(), tiny_oracle()
    return random_pair(7, **RANDOM[request.param])


@pytest.mark.parametrize("size", SIZES)
def test_decode_equals_the_library(pair: tuple[WanVAE, torch.nn.Module], size: tuple[int, int]):
    ours, library = pair
    latents = random_latents(6, *size)
    mean = torch.tensor(ours.config.latents_mean).view(-1, 1, 1, 1)
    std = torch.tensor(ours.config.latents_std).view(-1, 1, 1, 1)
    expected = library.decode((latents * std + mean)[None]).sample[0]
    torch.testing.assert_close(decode_in_calls(ours, latents, [3, 3]), expected, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
def test_encode_equals_the_library(pair: tuple[WanVAE, torch.nn.Module], size: tuple[int, int]):
    ours, library = pair
    pixels = random_pixels(21, *size)
    posterior = library.encode(pixels[None]).latent_dist
    moments, _ = ours.encode_moments(pixels, EncoderState())
    expected = posterior.parameters[0].permute(1, 2, 3, 0)
    torch.testing.assert_close(moments, expected, **MOMENTS_TOLERANCE)
    mean = torch.tensor(ours.config.latents_mean).view(-1, 1, 1, 1)
    std = torch.tensor(ours.config.latents_std).view(-1, 1, 1, 1)
    encoded = encode_in_calls(ours, pixels, [9, 12])
    torch.testing.assert_close(encoded, (posterior.mean[0] - mean) / std, **TOLERANCE)


@pytest.mark.parametrize("size", [(32, 48), (96, 160)])
def test_paths_agree(size: tuple[int, int]):
    latents, pixels = random_latents(3, *size), random_pixels(5, *size)
    decoded = [tiny_vae(p).decode(latents, DecoderState())[0] for p in ("stacked", "conv3d")]
    encoded = [tiny_vae(p).encode(pixels, EncoderState())[0] for p in ("stacked", "conv3d")]
    torch.testing.assert_close(*decoded, **TOLERANCE)
    torch.testing.assert_close(*encoded, **TOLERANCE)


@pytest.mark.advanced_model
def test_stacked_path_is_much_faster_on_a_processor():
    """One steady chunk at 96x160, base_dim 16; the goal is 0.3, the ceiling three times that."""
    stacked, _ = random_pair(1, base_dim=16)
    naive = WanVAE(stacked.config, conv_path="conv3d")
    naive.load_state_dict(stacked.state_dict())
    naive.prepare()
    seconds = {}
    for name, vae in (("stacked", stacked), ("conv3d", naive)):
        _, state = vae.decode(random_latents(1, 96, 160), DecoderState())
        _, state = vae.decode(random_latents(1, 96, 160), state)
        began = time.process_time()
        vae.decode(random_latents(3, 96, 160), state)
        seconds[name] = time.process_time() - began
    ratio = seconds["stacked"] / seconds["conv3d"]
    print(f"decode at 96x160, base_dim 16: {seconds}, ratio {ratio:.2f}")
    assert ratio < 0.9


@requires_golden
@pytest.mark.timeout(600)  # two threads on two busy cores wait for each other
@pytest.mark.parametrize("threads", [1, 2])
def test_golden_streams(threads: int):
    golden = load_set("e_encode_decode")
    facts = golden.manifest["facts"]["decode"]["chunks"]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        latents = golden.arrays["decode.latents"][0]
        state = DecoderState()
        for chunk in range(3):
            part = latents[:, 3 * chunk : 3 * chunk + 3]
            video, state = tiny_vae().decode(part, state)
            assert_matches(video[None], golden, f"decode.stream.chunk{chunk}")
            assert state.bytes() <= facts[chunk]["state_bytes"]
            difference = to_uint8(video).int() - golden.arrays[f"uint8.chunk{chunk}"].int()
            assert difference.abs().max() <= 1
        alone, _ = tiny_vae().decode(latents[:, 3:6], DecoderState())
        assert_matches(alone[None], golden, "decode.independent.chunk1")
        whole, _ = tiny_vae().decode(latents, DecoderState())
        assert_matches(whole[None], golden, "decode.whole")
        moments, _ = tiny_vae().encode_moments(golden.arrays["vae.clip"][0], EncoderState())
        assert_matches(moments.permute(3, 0, 1, 2)[None], golden, "vae.clip.moments")
    finally:
        torch.set_num_threads(before)


@requires_golden
def test_golden_encoder_state_is_not_larger():
    slots = load_set("e_encode_decode").manifest["facts"]["condition"]["encoder_cache_slots"]
    peers = sum(4 * torch.Size(slot).numel() for slot in slots if slot is not None)
    _, state = tiny_vae().encode(random_pixels(9, 64, 96), EncoderState())
    assert state.bytes() <= peers
