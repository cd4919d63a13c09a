"""Measures the picture quality of a toy world, and what a setting costs.

``python -m vllm_omni.tools.quality MODEL`` rolls out held-out walks on a CPU and compares every
picture with the renderer's. ``--against`` rolls them out again under other settings and tells how
much closer to the truth, or farther from it, each is: names of the list below, or JSON of arguments
of ``Omni``. Another seed is the yardstick: what moves the picture no more than it is hidden by it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vllm_omni.errors import ConfigError
from vllm_omni.tools.toy_world.measure import (
    Comparison,
    Controls,
    Interval,
    Plan,
    Walked,
    compare,
    measure_controls,
    measure_walks,
    walks_of,
)
from vllm_omni.tools.toy_world.score import KEYS, Trial, sheet

SETTINGS: dict[str, dict[str, object]] = {
    "other seed": {},
    "bfloat16": {"dtype": "bfloat16"},
    "W8A8 and bfloat16": {
        "dtype": "bfloat16",
        "model_config": {"lingbot_npu_quant": "w8a8"},
    },
    "reuse_last_step_kv": {"model_config": {"lingbot_reuse_last_step_kv": True}},
    "reference attention": {"attention_backend": "reference"},
    "two Ulysses ranks": {"ulysses_degree": 2},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
}
"""Named settings for ``--against``, on top of the base: float32, one rank, eager, ``auto``."""
FIGURES = ("psnr", "frozen", "ssim", "drift", "detail", "contrast")
"""What :func:`~vllm_omni.tools.toy_world.score.chunk_scores` gives, in the order of the tables."""
_SPANS = (4, 8, 20)
_COLUMNS = 20
_IDENTICAL_DB = 100.0
"""Above this not one byte of a hundred pictures differs by one level."""


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables, write the files that are asked for; 2 for a bad argument."""
    args = _parse(argv)
    plan = Plan(args.walks, args.chunks, args.key_starts, args.others, args.seed)
    try:
        settings = _settings(args.against)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    trials = walks_of(plan)
    base = measure_walks(args.model, trials, seed=plan.seed, progress=_progress)
    controls = measure_controls(args.model, plan, progress=_progress)
    print("\n".join(lines(plan, base, controls)), flush=True)
    chunks = min(args.against_chunks, plan.chunks)
    comparisons = [
        _against(args.model, name, options, base, trials, replace(plan, chunks=chunks))
        for name, options in settings.items()
    ]
    if comparisons:
        print("\n" + "\n".join(comparison_lines(comparisons, chunks)))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures(plan, base, controls, comparisons), indent=1)
        (args.out / "quality.json").write_text(text)
        Image.fromarray(contact_sheet(base, trials)).save(args.out / "quality.png")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_omni.tools.quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", type=Path, help="checkpoint of the toy world")
    known = ", ".join(SETTINGS)
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SETTING",
        help=f"JSON of arguments of Omni, or some of: {known}; or all",
    )
    parser.add_argument("--walks", type=_positive, default=20, help="held-out walks")
    parser.add_argument("--chunks", type=_positive, default=20, help="chunks of a walk")
    parser.add_argument("--against-chunks", type=_positive, default=8, help="of compared walks")
    parser.add_argument("--key-starts", type=int, default=6, help="18 chunks for each")
    parser.add_argument("--others", type=int, default=24, help="prompt changes, ways back")
    parser.add_argument("--seed", type=int, default=1, help="of the noise")
    parser.add_argument("--out", type=Path, help="folder for quality.json and quality.png")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _settings(wanted: list[str]) -> dict[str, dict[str, object]]:
    if wanted == ["all"]:
        return SETTINGS
    settings = {}
    for name in wanted:
        if name in SETTINGS:
            settings[name] = SETTINGS[name]
            continue
        try:
            settings[name] = dict(json.loads(name))
        except (ValueError, TypeError):
            raise ConfigError(
                f"--against: {name!r} is neither JSON of arguments of Omni nor one of "
                f"{', '.join(SETTINGS)}"
            ) from None
    return settings


def _against(
    model: Path,
    name: str,
    options: dict[str, object],
    base: Walked,
    trials: list[Trial],
    plan: Plan,
) -> Comparison:
    shorter = [
        Trial(trial.keys[: 3 * plan.chunks], trial.prompt, trial.truth[: plan.chunks])
        for trial in trials
    ]
    seed = plan.seed + (not options)
    other = measure_walks(model, shorter, options=options, seed=seed, progress=_progress)
    return compare(name, base, other)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


if __name__ == "__main__":
    sys.exit(main())
