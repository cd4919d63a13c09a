"""Replay golden arrays through the package's public classes and judge every one of them.

    python -m tests.golden.replay DIR [--set NAME ...] [--threads N] [--quiet] [--fail-fast]

DIR holds ``arrays/``, ``inputs/`` and a checkpoint. What makes an array is said by the recipes of
its set; ``tests/golden/README.md`` is their format. Per array: status, name, largest absolute
difference, tolerance. An array without a recipe fails; what is out of scope is skipped and says
why. The exit status is 1 if anything failed.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tests.golden import op_arithmetic, op_codec, op_transformer, op_world
from tests.golden.archive import Archive, RecipeError
from tests.golden.recipe import Job, Recipe, Run
from tests.golden.report import FAIL, INPUT, SKIP, Row, Target, judge
from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.errors import OmniError

OPERATIONS: Mapping[str, Callable[[Job], list[Run]]] = {
    "schedule": op_arithmetic.schedule,
    "sinusoid": op_arithmetic.sinusoid,
    "rotary": op_arithmetic.rotary,
    "resample": op_arithmetic.resample,
    "quaternions": op_arithmetic.quaternions,
    "deltas": op_arithmetic.deltas,
    "rays": op_arithmetic.rays,
    "keys": op_arithmetic.keys,
    "intrinsics": op_arithmetic.intrinsics,
    "live_rays": op_arithmetic.live_rays,
    "text": op_codec.text,
    "image": op_codec.image,
    "condition": op_codec.condition,
    "latent_statistics": op_codec.latent_statistics,
    "encode": op_codec.encode,
    "decode": op_codec.decode,
    "bytes": op_codec.to_bytes,
    "rollout": op_transformer.rollout,
    "forwards": op_transformer.forwards,
    "world": op_world.world,
    "sessions": op_world.sessions,
}
_OUT_OF_SCOPE = "out_of_scope"
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, OmniError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""What one recipe may raise without ending the others."""


def replay_set(archive: Archive, name: str) -> Iterator[Row]:
    """Rows of one set: recipe after recipe, then what no recipe makes, then the inputs."""
    entries = archive.load(name).manifest["arrays"]
    open_names = {array for array, entry in entries.items() if entry.get("role") != "input"}
    inputs = [array for array in entries if array not in open_names]
    for index, raw in enumerate(archive.recipes(name)):
        for row in recipe_rows(archive, name, f"recipe {index}", raw):
            open_names.discard(row.name)
            yield row
    yield from (
        Row(array, FAIL, note="no recipe makes this array")
        for array in entries
        if array in open_names
    )
    yield from (Row(array, INPUT) for array in inputs)


def recipe_rows(archive: Archive, name: str, where: str, raw: object) -> Iterator[Row]:
    """Rows of one recipe, whatever it raises."""
    outputs = raw.get("outputs") if isinstance(raw, dict) else None
    if not isinstance(outputs, dict) or not outputs:
        yield Row(where, FAIL, note="the recipe names no outputs")
        return
    waiting, reason = dict.fromkeys(outputs), "the recipe ended without it"
    try:
        for row in _replay(archive, name, where, raw):
            waiting.pop(row.name, None)
            yield row
    except _FAILURES as error:
        if not isinstance(error, RecipeError):
            traceback.print_exc()
        reason = f"{where} raised {type(error).__name__}: {error}"
    yield from (Row(array, FAIL, note=reason) for array in waiting)


def _replay(archive: Archive, name: str, where: str, raw: Mapping[str, object]) -> Iterator[Row]:
    values = {key: value for key, value in raw.items() if key not in {"op", "outputs"}}
    op, outputs = raw.get("op"), raw["outputs"]
    if op == _OUT_OF_SCOPE:
        yield from (Row(array, SKIP, note=str(values["reason"])) for array in outputs)
        return
    if op not in OPERATIONS:
        raise RecipeError(f"there is no operation {op!r}; there are {', '.join(OPERATIONS)}")
    targets = {array: _target(archive, name, array) for array in outputs}
    recipe = Recipe(
        name=f"{where} ({op})",
        op=str(op),
        values=values,
        outputs=outputs,
        dtypes=frozenset(target.float_name for target in targets.values()) - {""},
    )
    runs = _run(archive, recipe)
    exact = _run(archive, recipe.in_float32()) if recipe.is_low else []
    for array, result in outputs.items():
        yield judge(array, result, runs, targets[array], exact)


def _target(archive: Archive, name: str, array: str) -> Target:
    """The golden array of an output, of this set or of the one that is named."""
    set_name, inside = array.split(":", 1) if archive.is_reference(array) else (name, array)
    golden = archive.load(set_name)
    if inside not in golden.arrays:
        raise RecipeError(f"the set {set_name} has no array {inside}")
    return Target(golden.arrays[inside], golden.manifest["arrays"][inside])


def _run(archive: Archive, recipe: Recipe) -> list[Run]:
    """All runs of an experiment: in this process, or in as many as it wants ranks."""
    if recipe.ranks == 1:
        return OPERATIONS[recipe.op](Job.of(recipe, archive, ParallelState()))
    parallel = DiffusionParallelConfig(ulysses_degree=recipe.ranks)
    of_ranks = run_ranks(_run_on_rank, archive.root, recipe, parallel=parallel, timeout_s=300.0)
    return [run for runs in of_ranks for run in runs]


def _run_on_rank(parallel: ParallelState, root: Path, recipe: Recipe) -> list[Run]:
    with torch.inference_mode():
        runs = OPERATIONS[recipe.op](Job.of(recipe, Archive(root), parallel))
        wanted = frozenset(recipe.outputs.values())
        return [
            Run(run.label, {name: run.made[name].clone() for name in run.made if name in wanted})
            for run in runs
        ]


def replay(
    archive: Archive, sets: Sequence[str], *, quiet: bool = False, fail_fast: bool = False
) -> Counter[str]:
    """Replay and print; counts by status."""
    counts: Counter[str] = Counter()
    for name in sets:
        print(f"== {name}: {archive.load(name).manifest.get('description', '')}")
        of_set: Counter[str] = Counter()
        for row in replay_set(archive, name):
            of_set[row.status] += 1
            if not quiet or row.status == FAIL:
                print(row, flush=True)
            if fail_fast and row.status == FAIL:
                return counts + of_set
        print(f"== {name}: {_summary(of_set)}\n", flush=True)
        counts += of_set
    return counts


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no arrays"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.replay", description=__doc__.splitlines()[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--set", action="append", dest="sets", metavar="NAME", default=[])
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="print failures and sums only")
    parser.add_argument("--fail-fast", action="store_true", help="end at the first failure")
    options = parser.parse_args(arguments)
    archive = Archive(options.directory)
    unknown = [name for name in options.sets if name not in archive.names]
    if not archive.names or unknown:
        parser.error(f"no such sets: {unknown or options.directory}; there are {archive.names}")
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        counts = replay(
            archive,
            options.sets or archive.names,
            quiet=options.quiet,
            fail_fast=options.fail_fast,
        )
    print(f"all sets, {options.threads} threads: {_summary(counts)}")
    return int(counts[FAIL] > 0)


if __name__ == "__main__":
    sys.exit(main())
