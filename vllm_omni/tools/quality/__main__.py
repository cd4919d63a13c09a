"""Measures the picture quality of a toy world, and what a setting costs.

``python -m vllm_omni.tools.quality MODEL`` rolls out held-out walks on a CPU and compares every
picture with the renderer's. ``--against`` rolls them out again under other settings and tells how
much closer to the truth, or farther from it, each is: names of the list below, or JSON of arguments
of ``Omni``. Another seed is the yardstick: what moves the picture no more than it is hidden by it.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from PIL import Image

from vllm_omni.errors import ConfigError
from vllm_omni.tools.quality.measure import (
    Comparison,
    Plan,
    Walked,
    compare,
    measure_controls,
    measure_walks,
    walks_of,
)
from vllm_omni.tools.quality.report import comparison_lines, contact_sheet, figures, lines
from vllm_omni.tools.toy_world.score import Trial

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


if __name__ == "__main__":
    sys.exit(main())
