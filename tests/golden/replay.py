"""Replay golden arrays through the package's public classes and judge every one of them.

    python -m tests.golden.replay DIR [--set NAME ...] [--threads N] [--quiet]

DIR holds ``arrays/``, ``inputs/`` and a checkpoint. Per array: status, name, largest absolute
difference, tolerance. An array that nothing makes fails; what is skipped says why. The exit
status is 1 if anything failed.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.golden import (
    replay_camera,
    replay_codec,
    replay_rollout,
    replay_schedule,
    replay_transformer,
)
from tests.golden.archive import Archive, first_fact
from tests.golden.report import FAIL, INPUT, Row, compare
from tests.helpers.golden import GoldenSet

FAMILIES = (replay_schedule, replay_camera, replay_rollout, replay_codec, replay_transformer)
"""In the order in which they may claim names."""
_FAILURES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def replay_set(archive: Archive, name: str) -> Iterator[Row]:
    """Rows of one set, in the order of their making."""
    golden = archive.load(name)
    entries = golden.manifest["arrays"]
    aliases = {
        alias: target
        for alias, target in (first_fact(golden.manifest, "identical_to") or {}).items()
        if alias not in entries and target in entries
    }
    inputs = [array for array, entry in entries.items() if entry.get("role") == "input"]
    open_names = [array for array in (*entries, *aliases) if array not in inputs]
    seen: set[str] = set()
    for family in FAMILIES:
        claimed = family.claim(golden, open_names)
        open_names = [array for array in open_names if array not in claimed]
        for row in _family_rows(family, golden, claimed, archive, aliases):
            seen.add(row.name)
            yield row
    yield from (
        Row(array, FAIL, note="nothing in the replay makes an array of this name")
        for array in open_names
    )
    yield from (Row(array, INPUT) for array in inputs if array not in seen)


def _family_rows(
    family: object,
    golden: GoldenSet,
    claimed: Sequence[str],
    archive: Archive,
    aliases: dict[str, str],
) -> Iterator[Row]:
    if not claimed:
        return
    waiting, reason = dict.fromkeys(claimed), "the replay ended without it"
    try:
        for name, made in family.replay(golden, claimed, archive):
            waiting.pop(name, None)
            yield compare(name, made, golden, like=aliases.get(name))
    except _FAILURES as error:
        traceback.print_exc()
        reason = f"the replay raised {type(error).__name__}: {error}"
    entries = golden.manifest["arrays"]
    yield from (
        Row(name, FAIL, note=reason)
        for name in waiting
        if entries.get(name, {}).get("role") != "input"
    )


def replay(
    archive: Archive, sets: Sequence[str], *, quiet: bool = False
) -> tuple[Counter[str], list[Row]]:
    """Replay and print; counts by status, and the rows that failed."""
    counts: Counter[str] = Counter()
    failed: list[Row] = []
    for name in sets:
        print(f"== {name}: {archive.manifest(name).get('description', '')}")
        of_set: Counter[str] = Counter()
        for row in replay_set(archive, name):
            of_set[row.status] += 1
            failed += [row] * (row.status == FAIL)
            if not quiet or row.status == FAIL:
                print(row, flush=True)
        print(f"== {name}: {_summary(of_set)}\n", flush=True)
        counts += of_set
    return counts, failed


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
    options = parser.parse_args(arguments)
    archive = Archive(options.directory)
    unknown = [name for name in options.sets if name not in archive.names]
    if not archive.names or unknown:
        parser.error(f"no such sets: {unknown or options.directory}; there are {archive.names}")
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        counts, failed = replay(archive, options.sets or archive.names, quiet=options.quiet)
    print(f"all sets, {options.threads} threads: {_summary(counts)}")
    for row in failed:
        print(row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
