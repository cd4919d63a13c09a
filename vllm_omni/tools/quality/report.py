"""The report of a measurement as text, JSON and a picture."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from jaxtyping import UInt8

from vllm_omni.tools.quality.measure import Comparison, Controls, Interval, Plan, Walked
from vllm_omni.tools.toy_world.score import KEYS, Trial, sheet

FIGURES = ("psnr", "frozen", "ssim", "drift", "detail", "contrast")
"""What :func:`~vllm_omni.tools.toy_world.score.chunk_scores` gives, in the order of the tables."""
_SPANS = (4, 8, 20)
_COLUMNS = 20
_IDENTICAL_DB = 100.0
"""Above this not one byte of a hundred pictures differs by one level."""


def lines(plan: Plan, walked: Walked, controls: Controls | None) -> Iterator[str]:
    """One setting against the truth, as Markdown tables; intervals are 95 %."""
    yield f"{plan.walks} held-out walks of {plan.chunks} chunks, seed {plan.seed}"
    yield ""
    yield "| chunks | PSNR, dB | frozen, dB | SSIM | drift, levels | detail | contrast |"
    yield "|---|---|---|---|---|---|---|"
    later = range(_SPANS[-1], plan.chunks, _SPANS[-1])
    spans = [(0, end) for end in _SPANS] + [(first, first + _SPANS[-1]) for first in later]
    whole = [(f"{first + 1} to {end}", first, end) for first, end in spans if end <= plan.chunks]
    for name, first, end in [*whole, (f"{plan.chunks} alone", plan.chunks - 1, plan.chunks)]:
        cells = [str(walked.over(key, first, end)) for key in FIGURES]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    shown = np.unique(np.linspace(0, plan.chunks - 1, _COLUMNS).round().astype(int)).tolist()
    yield f"| chunk | {' | '.join(str(chunk + 1) for chunk in shown)} |"
    yield f"|---|{'---|' * len(shown)}"
    for name, key, digits in (("PSNR", "psnr", 1), ("frozen", "frozen", 1), ("SSIM", "ssim", 2)):
        means = [walked.over(key, chunk, chunk + 1).mean for chunk in shown]
        yield f"| {name} | {' | '.join(f'{mean:.{digits}f}' for mean in means)} |"
    if controls is not None:
        yield ""
        yield from _control_lines(controls)


def _control_lines(controls: Controls) -> Iterator[str]:
    if controls.recognised:
        shares = Interval.of([100 * float(np.mean(start)) for start in controls.recognised])
        right, chunks = sum(map(sum, controls.recognised)), sum(map(len, controls.recognised))
        yield (
            f"held key recognised in {right} of {chunks} chunks: {shares} % over "
            f"{len(controls.recognised)} starts; chance is 1 in {len(KEYS)}"
        )
    if controls.followed:
        count = len(controls.followed)
        for chunks in range(1, max(controls.followed) + 1):
            quick = sum(took <= chunks for took in controls.followed)
            share = Interval.of_share(quick, count)
            yield f"sky follows a prompt within {chunks} chunks in {quick} of {count}: {share} %"
        yield (
            f"back where it began, {count} ways: {Interval.of(controls.returned)} dB, the given "
            f"picture itself {Interval.of(controls.stayed)} dB"
        )


def comparison_lines(comparisons: Sequence[Comparison], chunks: int) -> Iterator[str]:
    """Settings against the base, as a Markdown table."""
    yield f"| setting | to the truth, {chunks} chunks | gain | gain, second half | to the base |"
    yield "|---|---|---|---|---|"
    for one in comparisons:
        alike = "the same" if one.alike.low > _IDENTICAL_DB else f"{one.alike.mean:.1f}"
        yield f"| {one.name} | {one.to_truth} | {one.gain} | {one.late_gain} | {alike} |"


def figures(
    plan: Plan, walked: Walked, controls: Controls | None, comparisons: Sequence[Comparison]
) -> dict[str, object]:
    """Everything but pixels, for a JSON file."""
    return {
        "plan": asdict(plan),
        "walks": walked.scores,
        "controls": None if controls is None else asdict(controls),
        "comparisons": [one.figures() for one in comparisons],
    }


def contact_sheet(
    walked: Walked, trials: Sequence[Trial], walks: int = 4, pictures: int = 12
) -> UInt8[np.ndarray, "height width 3"]:
    """The first walks, the model above the truth, at even times."""
    frames = sum(len(chunk) for chunk in trials[0].truth)
    every = math.ceil(frames / pictures)
    pairs = zip(walked.made[:walks], trials[:walks], strict=True)
    return np.concatenate([sheet(made, trial.truth, every) for made, trial in pairs])
