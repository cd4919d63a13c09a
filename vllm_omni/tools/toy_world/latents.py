"""Walks as the world model meets them: encoded once, kept in shards of half floats."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm import tqdm

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.tools.toy_world.stage import DEVICE, averaged
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin, pixels_of
from vllm_omni.tools.toy_world.walks import Walk, random_walk

SHARD = 50
"""Walks of a shard."""
CONDITION_FRAMES = 9
"""Latent frames after which the condition of a picture counts as constant."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Walks of one length; latents and conditions are normalised."""

    latents: Float[Tensor, "walks 16 frames h w"]
    conditions: Float[Tensor, "walks 16 condition_frames h w"]
    deltas: Float[Tensor, "walks frames 12"]
    prompts: Int64[Tensor, "walks chunks"]
    steady: Tensor
    keys: Tensor


def load_vae(path: Path) -> VaeTwin:
    """The averaged twin of a VAE stage."""
    vae = VaeTwin(VaeShape())
    vae.load_state_dict(averaged(path))
    return vae.eval().requires_grad_(requires_grad=False).to(DEVICE)


@torch.inference_mode()
def condition_of(
    vae: VaeTwin, picture: Tensor, frames: int = CONDITION_FRAMES
) -> Float[Tensor, "16 frames h w"]:
    """What the product's condition encoder makes of a first picture: it, then mid grey."""
    pixels = torch.zeros(1, 3, 4 * frames - 3, *picture.shape[:2])
    pixels[:, :, 0] = pixels_of([picture[None]])[:, :, 0]
    return vae.encode(pixels.to(next(vae.parameters()).device))[0]


def _encode(vae: VaeTwin, walks: Sequence[Walk]) -> dict[str, Tensor]:
    latents, conditions = [], []
    with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16):
        for walk in walks:
            latents.append(vae.encode(pixels_of([walk.frames]).to(DEVICE))[0].half().cpu())
            conditions.append(condition_of(vae, torch.as_tensor(walk.frames[0])).half().cpu())
    return {
        "latents": torch.stack(latents),
        "conditions": torch.stack(conditions),
        "deltas": torch.stack([torch.from_numpy(walk.deltas) for walk in walks]),
        "prompts": torch.stack([torch.from_numpy(walk.prompts) for walk in walks]),
        "steady": torch.tensor([walk.steady for walk in walks]),
        "keys": torch.tensor([walk.keys for walk in walks]),
    }


def write_shards(folder: Path, vae_path: Path, *, walks: int, chunks: int) -> None:
    """Encode walks 0 to ``walks``; shards that are there stay, so that it can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    vae = load_vae(vae_path)
    for first in tqdm(range(0, walks, SHARD), desc="latents", mininterval=10):
        path = folder / f"{first:06d}.pt"
        if path.exists():
            continue
        shard = _encode(vae, [random_walk(first + i, chunks=chunks) for i in range(SHARD)])
        torch.save(shard, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def statistics(folder: Path) -> tuple[Float[Tensor, "16"], Float[Tensor, "16"]]:
    """Mean and spread of each latent channel over the first shard.

    The spread is one number for all: channels that matter little to the picture stay small, and so
    does their error.
    """
    latents = torch.load(folder / "000000.pt")["latents"].float().transpose(0, 1).flatten(1)
    mean = latents.mean(1)
    spread = (latents - mean[:, None]).square().mean().sqrt()
    return mean, spread.expand(16).clone()


def load_shards(folder: Path, known: int = 0) -> list[Encoded]:
    """The shards from the ``known``-th on that are complete."""
    mean, std = (part[None, :, None, None, None] for part in statistics(folder))
    shards = []
    for path in sorted(folder.glob("*.pt"))[known:]:
        data = torch.load(path)
        for name in ("latents", "conditions"):
            data[name] = ((data[name].float() - mean) / std).half()
        shards.append(Encoded(**data))
    return shards


def chunk_of(frames: Tensor, index: int) -> Tensor:
    """Latent frames of one chunk; past the end the last frame stands for all (conditions)."""
    if LATENT_FRAMES_PER_CHUNK * (index + 1) <= frames.shape[-3]:
        return frames[
            ..., LATENT_FRAMES_PER_CHUNK * index : LATENT_FRAMES_PER_CHUNK * (index + 1), :, :
        ]
    return frames[..., -1:, :, :].expand(
        *frames.shape[:-3], LATENT_FRAMES_PER_CHUNK, *frames.shape[-2:]
    )
