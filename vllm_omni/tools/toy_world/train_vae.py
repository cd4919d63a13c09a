"""Training of the VAE twin: an autoencoder of single pictures first, then of clips."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from vllm_omni.tools.toy_world.stage import DEVICE, Stage
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin, pixels_of
from vllm_omni.tools.toy_world.walks import random_walk

FIRST_SEED = 10_000_000
"""Walks that only the VAE learns from."""
_NOISE = 0.2
"""Latents bear up to this much noise, so that the decoder forgives the world model."""
_SHRINK = 3e-3
_PICTURES = 4
_WALK_EVERY = 10
_POOL = 32
_CHUNKS = 4


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


def train_vae(path: Path, *, steps: int, peak: float = 2.5e-3, pictures: float = 0.4) -> Stage:
    """Train (or go on training) to ``steps``; the first share of them is of single pictures."""
    torch.manual_seed(0)
    vae = VaeTwin(VaeShape())
    stage = Stage(path, vae, steps=steps, peak=peak)
    pool = _Pool()
    bar = tqdm(total=steps, initial=stage.step, desc="vae", mininterval=10)
    while stage.step < steps:
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
        if stage.step % 50 == 0:
            bar.set_postfix(stage.point())
        bar.update()
        stage.save()
    stage.save(now=True)
    bar.close()
    return stage
