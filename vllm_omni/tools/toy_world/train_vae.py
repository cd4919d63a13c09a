"""The toy world's VAE: its training, single pictures first, then clips, and what it encodes.

The walks that the world model learns from are encoded once and kept in shards of half floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.tools.toy_world.stage import DEVICE, Stage, averaged
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin, pixels_of
from vllm_omni.tools.toy_world.walks import Walk, random_walk

FIRST_SEED = 10_000_000
"""Walks that only the VAE learns from."""
_NOISE = 0.2
"""Latents bear up to this much noise, so that the decoder forgives the world model."""
_SHRINK = 3e-3
_PICTURES = 4
_WALK_EVERY = 10
_POOL = 32
_CHUNKS = 4
_PEAK = 2.5e-3
SHARD = 50
"""Walks of a shard."""
CONDITION_FRAMES = 9
"""Latent frames after which the condition of a picture counts as constant."""


class _Pool:
    """The walks of the moment: a new one every ten steps pushes out the oldest."""

    def __init__(self) -> None:
        self.walks: dict[int, np.ndarray] = {}

    def clips(self, stage: Stage, pictures_until: int) -> Float[Tensor, "b 3 t h w"]:
        newest = FIRST_SEED + 8 + stage.step // _WALK_EVERY
        wanted = range(max(FIRST_SEED, newest - _POOL), newest)
        for seed in wanted:
            if seed not in self.walks:
                self.walks[seed] = random_walk(seed, chunks=_CHUNKS).frames
        for seed in [seed for seed in self.walks if seed not in wanted]:
            del self.walks[seed]
        rng = stage.rng
        if stage.step < pictures_until:
            drawn = [self.walks[int(rng.choice(wanted))] for _ in range(_PICTURES)]
            return pixels_of([walk[int(rng.integers(len(walk)))][None] for walk in drawn])
        walk = self.walks[int(rng.choice(wanted))]
        long = rng.random() < 0.4
        first = int(rng.integers(len(walk) - (32 if long else 8)))
        if not long:
            return pixels_of([walk[first : first + 9]])
        row, column = int(rng.integers(5)) * 8, int(rng.integers(7)) * 8
        return pixels_of([walk[first : first + 33, row : row + 32, column : column + 48]])


def loss_of(pixels: Float[Tensor, "b 3 t h w"], made: Float[Tensor, "b 3 t h w"]) -> Tensor:
    """Absolute and squared error, and absolute error of the edges."""
    wrong = made - pixels
    edges = (wrong.diff(dim=-1).abs().mean() + wrong.diff(dim=-2).abs().mean()) / 2
    return wrong.abs().mean() + wrong.square().mean() + edges


def train_vae(path: Path, *, steps: int, pictures: float) -> None:
    """Train (or go on training) to ``steps``; this share of them is of single pictures."""
    torch.manual_seed(0)
    vae = VaeTwin(VaeShape())
    stage = Stage(path, vae, steps=steps, peak=_PEAK)
    pool = _Pool()
    for _ in stage.remaining():
        pixels = pool.clips(stage, pictures_until=int(pictures * steps)).to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            latents = vae.encode(pixels)
            noise = float(stage.rng.uniform(0, _NOISE)) * torch.randn_like(latents)
            made = vae.decode(latents + noise).float()
        stage.learn(loss_of(pixels, made) + _SHRINK * latents.float().square().mean())
        error = F.mse_loss(made.detach().clamp(-1, 1), pixels)
        stage.note(
            psnr=10 * float(np.log10(4 / float(error))),
            spread=float(latents.detach().float().std()),
        )


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
