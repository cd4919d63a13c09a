"""The twins compute what the product computes, to float32 rounding."""

from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.tools.toy_world.prompts import embed_prompts
from vllm_omni.tools.toy_world.score import load, play
from vllm_omni.tools.toy_world.train import write_checkpoint
from vllm_omni.tools.toy_world.train_vae import chunk_of, condition_of
from vllm_omni.tools.toy_world.train_world import SIGMAS
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin
from vllm_omni.tools.toy_world.walks import Walker, key_motion, script
from vllm_omni.tools.toy_world.world_twin import WorldShape, WorldTwin, window

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

CHUNKS = 6
PROMPT = "A night on the island."


Twin = TypeVar("Twin", VaeTwin, WorldTwin)


def _randomised(model: Twin) -> Twin:
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.eval().requires_grad_(requires_grad=False)


def test_six_chunks_of_a_rollout_equal_the_products(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae, world = _randomised(VaeTwin(VaeShape())), _randomised(WorldTwin(WorldShape()))
    statistics = (torch.zeros(16), torch.ones(16))
    write_checkpoint(
        tmp_path, vae=vae.state_dict(), world=world.state_dict(), statistics=statistics,
        dtype=torch.float32,
    )  # fmt: skip
    keys = script("w4 wl3 l2 s3 wi3 a3")
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    with load(tmp_path) as omni:
        latents = play(omni, picture, keys, PROMPT, seed=5, output_type="latent")
    product = torch.stack(
        [torch.as_tensor(chunk).reshape(16, LATENT_FRAMES_PER_CHUNK, 8, 12) for chunk in latents]
    )
    assert len(product) == CHUNKS
    assert 0.3 < product.std() < 3

    # A script's latent frame 0 has the delta of its keys, too, although it is the picture.
    walker = Walker(0.0, 0.0, 0.0)
    deltas = np.stack([walker.step(key_motion(held)) for held in keys]).reshape(
        CHUNKS, LATENT_FRAMES_PER_CHUNK, 12
    )
    longest = np.linalg.norm(deltas[..., 9:], axis=-1).max(1)[:, None, None]
    deltas[..., 9:] /= np.where(longest > 0, longest, 1)
    rows, counts = embed_prompts(tmp_path, [PROMPT])
    picture_condition = condition_of(
        vae, torch.as_tensor(picture), frames=LATENT_FRAMES_PER_CHUNK * CHUNKS
    )
    mask = torch.zeros(CHUNKS, 4, LATENT_FRAMES_PER_CHUNK, 8, 12)
    mask[0, :, 0] = 1
    condition = torch.cat(
        [mask, torch.stack([chunk_of(picture_condition, c) for c in range(CHUNKS)])], 1
    )
    scene = world.scene(
        torch.from_numpy(deltas).float()[None],
        torch.tensor([1]),
        (rows, counts, torch.zeros(1, CHUNKS, dtype=torch.long)),
        torch.arange(CHUNKS)[None] * LATENT_FRAMES_PER_CHUNK,
    )
    generator = torch.Generator().manual_seed(5)
    for c in range(CHUNKS):
        slots = [*range(c), c]
        sees = [window(slot, range(c), world.shape.ring_chunks) for slot in slots]
        noise = [
            torch.randn(16, LATENT_FRAMES_PER_CHUNK, 8, 12, generator=generator) for _ in SIGMAS
        ]
        x = noise[0]
        for step, sigma in enumerate(SIGMAS):
            blocks = torch.cat([torch.cat([product[:c], x[None]]), condition[: c + 1]], 1)
            times = torch.tensor([0.0] * c + [float(sigma) * 1000])
            flow, _ = world(blocks[None], times[None], scene.at(slots), sees)
            x = x - sigma * flow[0, -1]
            if step < 3:
                x = (1 - SIGMAS[step + 1]) * x + SIGMAS[step + 1] * noise[step + 1]
        torch.testing.assert_close(x, product[c], atol=1e-5, rtol=1e-5)


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
