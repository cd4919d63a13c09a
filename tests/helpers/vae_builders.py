"""VAEs for tests: of the tiny checkpoint, and random ones of other shapes beside their oracle."""

import json
from functools import cache

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE


def tiny_fields() -> dict:
    return json.loads((tiny_checkpoint_dir() / "vae" / "config.json").read_text())


@cache
def tiny_weights() -> dict[str, torch.Tensor]:
    return load_file(tiny_checkpoint_dir() / "vae" / "diffusion_pytorch_model.safetensors")


@cache
def tiny_vae(conv_path: str = "auto", dtype: torch.dtype = torch.float32) -> WanVAE:
    """The tiny checkpoint's VAE, ready to run. Shared: do not change it."""
    return prepared(VaeConfig.from_json(tiny_fields()), tiny_weights(), conv_path, dtype)


def prepared(
    config: VaeConfig,
    weights: dict[str, torch.Tensor],
    conv_path: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> WanVAE:
    vae = WanVAE(config, conv_path=conv_path)
    vae.load_state_dict(weights)
    vae.to(dtype).prepare()
    return vae


@cache
def tiny_oracle() -> AutoencoderKLWan:
    oracle = AutoencoderKLWan.from_config(tiny_fields())
    oracle.load_state_dict(tiny_weights())
    return oracle.eval()


@cache
def random_pair(seed: int, **fields: object) -> tuple[WanVAE, AutoencoderKLWan]:
    """Our VAE and the library's with the same random weights."""
    torch.manual_seed(seed)
    lists = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    oracle = AutoencoderKLWan(**lists).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("gamma"):
                parameter.normal_(1.0, 0.2)
    config = VaeConfig.from_json({**oracle.config, "_class_name": "AutoencoderKLWan"})
    return prepared(config, oracle.state_dict()), oracle


def random_latents(latent_frames: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Model-space latents for a video of ``height`` x ``width`` pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, latent_frames, height // 8, width // 8, generator=generator)


def random_pixels(pixel_frames: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, pixel_frames, height, width, generator=generator) * 2 - 1


def decode_in_calls(vae: WanVAE, latents: torch.Tensor, plan: list[int]) -> torch.Tensor:
    """Decode a clip in calls of ``plan`` latent frames."""
    state, videos = DecoderState(), []
    for part in latents.split(plan, dim=1):
        video, state = vae.decode(part, state)
        videos.append(video)
    return torch.cat(videos, dim=1)


def encode_in_calls(vae: WanVAE, pixels: torch.Tensor, plan: list[int]) -> torch.Tensor:
    """Encode a clip in calls of ``plan`` pixel frames."""
    state, latents = EncoderState(), []
    for part in pixels.split(plan, dim=1):
        encoded, state = vae.encode(part, state)
        latents.append(encoded)
    return torch.cat(latents, dim=1)
