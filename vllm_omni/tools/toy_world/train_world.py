"""Training of the world twin on latents.

A row is a sink chunk and a run of consecutive chunks of one walk. All of them are learnt at once:
each is a clean block that later chunks see, and a noisy block at each of two of the four noise
levels that the sampler visits, which are the only ones there are. The place is deterministic, so
the target is the truth itself and the loss is its squared error.

Against drift, three things the sampler does are done here too: the second probe starts from what
the model made of the first; history is the model's own past work, kept from the last visit to that
walk, mixed with truth; and history is noisy.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule
from vllm_omni.tools.toy_world.prompts import PROMPTS, WORDS, embed_prompts
from vllm_omni.tools.toy_world.stage import DEVICE, Stage
from vllm_omni.tools.toy_world.train_vae import Encoded, chunk_of, load_shards
from vllm_omni.tools.toy_world.world_twin import WorldShape, WorldTwin, window

SIGMAS = torch.tensor(DmdSchedule.with_shift(5.0).sigmas)
"""Noise levels of the four probes at flow shift 5."""
RUN = 4
"""Chunks of a row that are learnt."""
_OWN_FROM, _OWN_FULL, _OWN_SHARE = 500, 2500, 0.6
_HISTORY_NOISE = 0.15
_REFRESH_EVERY = 50
_FAR = 250
"""Rows stand up to this many chunks after their sink."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots of a row: which are clean blocks and which are learnt."""

    clean: tuple[int, ...]
    learnt: tuple[int, ...]

    def sees(self, slots: tuple[int, ...], ring_chunks: int) -> list[tuple[int, ...]]:
        """What blocks at these slots see among the clean ones."""
        return [window(slot, self.clean, ring_chunks) for slot in slots]


FIRST = Plan(tuple(range(RUN - 1)), tuple(range(RUN)))
"""Rows from the first picture on."""
LATER = Plan(tuple(range(RUN + 1)), tuple(range(2, RUN + 2)))
"""Rows in the middle of a walk: the sink, the chunk before, and the run."""


@dataclass(slots=True)
class Rows:
    """A batch; everything is ``[batch, slots, ...]``."""

    shard: list[int]
    walk: list[int]
    chunks: list[list[int]]
    truth: Tensor
    own: Tensor
    condition: Tensor
    deltas: Tensor
    prompt: Tensor
    starts: Tensor
    kind: Tensor


class Corpus:
    """Walks in memory, what the model made of them, and the prompts.

    Args:
        folder: of latents; shards that appear later are taken in by :meth:`refresh`.
        text: a checkpoint with tokenizer and text encoder.
    """

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder = folder
        self.shards: list[Encoded] = []
        self.own: list[Tensor] = []
        rows, counts = embed_prompts(text, [prompt for _, prompt in PROMPTS])
        self.prompts = (rows.to(DEVICE), counts.to(DEVICE))
        lights = np.array([light for light, _ in PROMPTS])
        self.by_light = [np.flatnonzero(lights == light) for light in range(len(WORDS) + 1)]
        self.refresh()

    def refresh(self) -> None:
        """Take in the shards that have been completed since."""
        for shard in load_shards(self.folder, known=len(self.shards)):
            self.shards.append(shard)
            self.own.append(shard.latents.clone())

    def draw(self, rng: np.random.Generator, batch: int, plan: Plan) -> Rows:
        """Draw a batch of rows from walks at random."""
        picks = [self._draw_row(rng, first=plan is FIRST) for _ in range(batch)]
        columns = list(zip(*picks, strict=True))
        shard, walk, chunks = (list(column) for column in columns[:3])
        return Rows(
            shard, walk, chunks, *(torch.stack(column).to(DEVICE) for column in columns[3:])
        )

    def _draw_row(self, rng: np.random.Generator, *, first: bool) -> tuple:
        s = int(rng.integers(len(self.shards)))
        shard = self.shards[s]
        w = int(rng.integers(len(shard.keys)))
        length = shard.prompts.shape[1]
        begin = 1 if first else int(rng.integers(1, length - RUN))
        chunks = [0, *range(begin, begin + (RUN - 1 if first else RUN + 1))]
        gap = 0
        if not first and rng.random() < 0.5:
            gap = int(np.exp(rng.uniform(0, np.log(_FAR))))
        condition = [_condition(shard.conditions[w], c + (gap if c else 0)) for c in chunks]
        lights = shard.prompts[w][chunks].tolist()
        words = [int(rng.choice(which)) for which in self.by_light]
        if bool(shard.steady[w]) and rng.random() < 0.25:
            lights = [len(WORDS)] * len(chunks)
        recorded = rng.random() < (0.1 if bool(shard.keys[w]) else 0.7)
        return (
            s,
            w,
            chunks,
            torch.stack([chunk_of(shard.latents[w], c) for c in chunks]).float(),
            torch.stack([chunk_of(self.own[s][w], c) for c in chunks]).float(),
            torch.stack(condition),
            torch.stack(
                [
                    shard.deltas[w][LATENT_FRAMES_PER_CHUNK * c : LATENT_FRAMES_PER_CHUNK * (c + 1)]
                    for c in chunks
                ]
            ),
            torch.tensor([words[light] for light in lights]),
            torch.tensor([LATENT_FRAMES_PER_CHUNK * (c + (gap if c else 0)) for c in chunks]),
            torch.tensor(0 if recorded else 1),
        )

    def remember(self, rows: Rows, plan: Plan, made: Float[Tensor, "b n 16 3 h w"]) -> None:
        """Keep what the model made of the learnt chunks."""
        for row, (s, w, chunks) in enumerate(zip(rows.shard, rows.walk, rows.chunks, strict=True)):
            for place, slot in enumerate(plan.learnt):
                chunk_of(self.own[s][w], chunks[slot]).copy_(made[row, place])


def _condition(condition: Tensor, chunk: int) -> Tensor:
    """Mask and latents of a chunk's condition, as the product lays them out."""
    latents = chunk_of(condition, chunk).float()
    mask = torch.zeros(4, *latents.shape[1:])
    if chunk == 0:
        mask[:, 0] = 1
    return torch.cat([mask, latents])


def losses(
    model: WorldTwin, corpus: Corpus, rows: Rows, plan: Plan, own_share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared errors ``[batch, learnt]`` at the first level and at a later one, and that level.

    Remembers what the model made.
    """
    batch = len(rows.walk)
    blocks = plan.clean + plan.learnt
    ring = model.shape.ring_chunks
    scene = model.scene(rows.deltas, rows.kind, (*corpus.prompts, rows.prompt), rows.starts)
    each = (batch, len(plan.clean), 1, 1, 1, 1)
    pick = torch.rand(each, device=DEVICE) < own_share
    clean = torch.where(pick, rows.own[:, plan.clean], rows.truth[:, plan.clean])
    amount = _HISTORY_NOISE * torch.rand(each, device=DEVICE)
    clean = clean + amount * torch.randn_like(clean)
    truth = rows.truth[:, plan.learnt]
    noise = torch.randn_like(truth)
    x = torch.cat([clean, noise], 1)
    time = torch.tensor([0.0] * len(plan.clean) + [1000.0] * len(plan.learnt), device=DEVICE)
    flow, past = model(
        torch.cat([x, rows.condition[:, blocks]], 2),
        time.expand(batch, -1),
        scene.at(blocks),
        plan.sees(blocks, ring),
    )
    first = noise - flow[:, len(plan.clean) :]
    level = 3 - torch.randint(0, 5, (batch, len(plan.learnt))).sub(2).clamp_min(0)
    sigma = SIGMAS[level].to(DEVICE)[..., None, None, None, None]
    base = torch.where(torch.rand_like(sigma) < 0.8, first.detach(), truth)
    x = (1 - sigma) * base + sigma * torch.randn_like(base)
    flow, _ = model(
        torch.cat([x, rows.condition[:, plan.learnt]], 2),
        SIGMAS[level].to(DEVICE) * 1000,
        scene.at(plan.learnt),
        plan.sees(plan.learnt, ring),
        past,
    )
    second = x - sigma * flow
    corpus.remember(rows, plan, second.detach())
    errors = [(made - truth).square().mean((2, 3, 4, 5)) for made in (first, second)]
    return errors[0], errors[1], level


def own_share(step: int) -> float:
    """How much of the history is the model's own: none at first, when its work is worth nothing."""
    ramp = (step - _OWN_FROM) / (_OWN_FULL - _OWN_FROM)
    return _OWN_SHARE * min(1.0, max(0.0, ramp))


def train_world(
    path: Path, latents: Path, text: Path, *, steps: int, batch: int, peak: float
) -> None:
    """Train (or go on training) to ``steps``."""
    torch.manual_seed(0)
    model = WorldTwin(WorldShape())
    stage = Stage(path, model, steps=steps, peak=peak)
    corpus = Corpus(latents, text)
    for step in stage.remaining():
        if step % _REFRESH_EVERY == 0:
            corpus.refresh()
        plan = FIRST if step % 3 == 0 else LATER
        rows = corpus.draw(stage.rng, batch, plan)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            first, second, level = losses(model, corpus, rows, plan, own_share(step))
        stage.learn(0.5 * first.mean() + second.mean())
        name = "start" if plan is FIRST else "later"
        stage.note(**{f"{name}_first": float(first.detach().mean())})
        if bool((level == 3).any()):
            stage.note(**{f"{name}_last": float(second.detach()[level == 3].mean())})
