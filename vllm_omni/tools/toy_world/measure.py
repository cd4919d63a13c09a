"""Rollouts of held-out trials under one setting, and what they say against the truth."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from vllm_omni import Omni
from vllm_omni.tools.toy_world.score import (
    Frames,
    Trial,
    back_trial,
    chunk_scores,
    held_out_trial,
    key_trials,
    load,
    prompt_trial,
    psnr,
    recognised,
    roll,
)

_KEY_CHUNKS = 3
_PROMPT_CHUNKS = 4
_SKY_ROWS = 12
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is rolled out.

    Attributes:
        walks: held-out walks by keys, of ``chunks`` chunks each.
        key_starts: starts from which each of six keys is held for three chunks.
        others: prompt changes, and as many ways there and back.
        seed: of every rollout's noise.
    """

    walks: int = 20
    chunks: int = 20
    key_starts: int = 6
    others: int = 24
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the 95 % interval of a bootstrap over walks."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Resample the walks 4000 times; the same for the same values."""
        data = np.asarray(values, np.float64)
        picks = np.random.default_rng(0).integers(len(data), size=(4000, len(data)))
        low, high = np.percentile(data[picks].mean(1), (2.5, 97.5))
        return cls(float(data.mean()), float(low), float(high))

    @classmethod
    def of_share(cls, hits: int, count: int) -> "Interval":
        """Percentage of independent trials that succeed, with the interval of Wilson (1927)."""
        share, z = hits / count, 1.96
        middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
        half = (
            z
            / (1 + z**2 / count)
            * math.sqrt(share * (1 - share) / count + z**2 / (2 * count) ** 2)
        )
        return cls(*(100 * value for value in (share, middle - half, middle + half)))

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Walked:
    """The walks of one setting: pixels by walk and chunk, and their scores.

    Attributes:
        scores: for each walk, figures by name and chunk: see
            :func:`~vllm_omni.tools.toy_world.score.chunk_scores`.
    """

    made: list[list[Frames]]
    scores: list[dict[str, list[float]]]

    def over(self, name: str, first: int, end: int) -> Interval:
        """A figure's mean over chunks ``first`` to ``end - 1``."""
        return Interval.of([float(np.mean(walk[name][first:end])) for walk in self.scores])


@dataclass(frozen=True, slots=True)
class Controls:
    """Whether the world does what it is told.

    Attributes:
        recognised: for each start and chunk under one held key, whether that key's true video is
            the closest of six.
        followed: for each prompt that names another light than the picture's, the number of chunks
            after which the sky stays nearer to the new light; one more than there are for never.
        returned: PSNR of the last picture of a way there and back.
        stayed: PSNR of the given picture as the model shows it, which no way back can pass.
    """

    recognised: list[list[bool]]
    followed: list[int]
    returned: list[float]
    stayed: list[float]


def walks_of(plan: Plan) -> list[Trial]:
    """The held-out walks of a plan."""
    return [held_out_trial(index, chunks=plan.chunks) for index in range(plan.walks)]


def measure_walks(
    model: Path,
    trials: Sequence[Trial],
    *,
    options: Mapping[str, object] | None = None,
    seed: int = 1,
    progress: Progress = print,
) -> Walked:
    """Roll out every walk under ``options``, arguments of :class:`~vllm_omni.Omni`."""
    walked = Walked([], [])
    with load(model, options) as omni:
        for index, trial in enumerate(trials):
            made = roll(omni, trial, seed=seed)
            walked.made.append(made)
            walked.scores.append(chunk_scores(made, trial.truth))
            progress(f"walk {index + 1} of {len(trials)}")
    return walked


def measure_controls(model: Path, plan: Plan, *, progress: Progress = print) -> Controls:
    """Hold keys, change the light by a prompt, and walk back."""
    controls = Controls([], [], [], [])
    with load(model) as omni:
        for start in range(plan.key_starts):
            held = _hold_keys(omni, key_trials(start, chunks=_KEY_CHUNKS), plan.seed)
            controls.recognised.append(held)
            progress(f"keys from start {start + 1} of {plan.key_starts}")
        for index in range(plan.others):
            trial = prompt_trial(index, chunks=_PROMPT_CHUNKS)
            made = roll(omni, trial, seed=plan.seed)
            ends = {"old": trial.truth[0][0], "new": trial.truth[-1][-1]}
            controls.followed.append(sky_follows(made, **ends))
            trial = back_trial(index)
            made = roll(omni, trial, seed=plan.seed)
            controls.returned.append(psnr(made[-1][-1:], trial.truth[-1][-1:]))
            controls.stayed.append(psnr(made[0][:1], trial.truth[0][:1]))
        progress("prompts, and ways back")
    return controls


def _hold_keys(omni: Omni, trials: list[Trial], seed: int) -> list[bool]:
    made = [roll(omni, trial, seed=seed) for trial in trials]
    return [right for index, one in enumerate(made) for right in recognised(one, trials, index)]


def sky_follows(
    made: Sequence[Frames],
    *,
    old: UInt8[np.ndarray, "height width 3"],
    new: UInt8[np.ndarray, "height width 3"],
) -> int:
    """Chunks after whose end the sky stays nearer to that of ``new`` than to that of ``old``."""

    def sky(picture: UInt8[np.ndarray, "height width 3"]) -> Float[np.ndarray, "3"]:
        return picture[:_SKY_ROWS].mean((0, 1))

    near = [
        bool(np.linalg.norm(sky(chunk[-1]) - sky(new)) < np.linalg.norm(sky(chunk[-1]) - sky(old)))
        for chunk in made
    ]
    return len(near) - near[::-1].index(False) + 1 if False in near else 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """One setting against another over the same walks.

    Attributes:
        to_truth: PSNR of the compared setting to the renderer.
        gain: how much closer to the renderer it is, walk by walk, dB; negative is a loss.
        late_gain: the same over the second half of the chunks.
        alike: PSNR of the two settings to each other; infinite where every byte is the same.
    """

    name: str
    to_truth: Interval
    gain: Interval
    late_gain: Interval
    alike: Interval

    @property
    def costs(self) -> bool:
        """Whether the loss is beyond chance: the whole interval is below 0."""
        return self.gain.high < 0

    def figures(self) -> dict[str, object]:
        """The comparison for a JSON file."""
        return {**asdict(self), "costs": self.costs}


def compare(name: str, base: Walked, other: Walked) -> Comparison:
    """Compare two settings; the base may have more chunks, which do not count."""
    chunks = len(other.made[0])
    half = chunks // 2

    def gains(first: int) -> Interval:
        pairs = zip(other.scores, base.scores, strict=True)
        return Interval.of(
            [
                float(np.mean(b["psnr"][first:chunks]) - np.mean(a["psnr"][first:chunks]))
                for b, a in pairs
            ]
        )

    alike = [
        psnr(np.concatenate(b), np.concatenate(a[:chunks]))
        for b, a in zip(other.made, base.made, strict=True)
    ]
    return Comparison(
        name, other.over("psnr", 0, chunks), gains(0), gains(half), Interval.of(alike)
    )
