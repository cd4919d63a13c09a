"""Put every fault of the catalogue into a copy of the tree and see whether its check fails.

    python -m tests.mutants [--only WORD] [--out FILE]

Prints one line per fault: what it is, in which file, and what caught it. Every check first has to
pass without a fault. The exit status is 1 if a fault was not caught, or could not be put in.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.oracle_set import write_oracle_set
from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("vllm_omni", "tests", "benchmarks", "pyproject.toml")
_DATA = "tests/golden/data"
_LIMIT_S = 600
_FAILED_REPLAY = re.compile(r"^FAIL +(\S+)", re.MULTILINE)
_FAILED_TEST = re.compile(r"^FAILED (\S+)", re.MULTILINE)


class Tree:
    """A copy of what checks need."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        for name in _COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, self.root / name)
        (folder / "oracle").mkdir()
        self.oracle = write_oracle_set(folder / "oracle")
        self._whole: dict[Path, str] = {}
        self._sound: dict[str, str | None] = {}

    def put_in(self, mutant: Mutant) -> str:
        """Make the changes; what is wrong with one of them, empty if nothing is."""
        for change in mutant.changes:
            path = self.root / change.file
            text = path.read_text()
            if text.count(change.old) != 1:
                return f"{change.file} has the place {text.count(change.old)} times, not once"
            self._whole.setdefault(path, text)
            path.write_text(text.replace(change.old, change.new))
        return ""

    def take_out(self) -> None:
        """Undo all changes."""
        for path, text in self._whole.items():
            path.write_text(text)
        self._whole.clear()

    def fails_without_a_fault(self, check: str) -> str | None:
        """What a check finds in the sound tree; each is asked once."""
        if check not in self._sound:
            self._sound[check] = self.fails(check)
        return self._sound[check]

    def fails(self, check: str) -> str | None:
        """What failed, ``None`` if everything passed.

        Raises:
            RuntimeError: if the check could not be run.
        """
        if check.startswith("replay "):
            _, where, name = check.split()
            folder = self.oracle if where == "oracle" else self.root / _DATA
            command = ["-m", "tests.golden.replay", str(folder), "--set", name, "--fail-fast"]
            pattern = _FAILED_REPLAY
        else:
            command = [
                *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
                *("--run-level", "advanced_model", check),
            ]
            pattern = _FAILED_TEST
        done = self._run(command)
        if done is None:
            return f"{check}: did not end in {_LIMIT_S} s"
        found = pattern.search(done.stdout)
        if done.returncode == 0:
            return None
        if done.returncode != 1 or found is None:
            raise RuntimeError(f"{check}: exit {done.returncode}\n{done.stdout[-2000:]}")
        return f"{check}: {found[1]}" if check.startswith("replay ") else found[1]

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
        settings = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        try:
            return subprocess.run(
                [sys.executable, *command],
                cwd=self.root,
                env={**os.environ, **settings, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None


def judge(tree: Tree, mutant: Mutant) -> tuple[bool, str]:
    """Whether a fault was caught, and by what or why not."""
    try:
        unsound = tree.fails_without_a_fault(mutant.check)
        if unsound is not None:
            return False, f"BROKEN: fails without a fault, {unsound}"
        problem = tree.put_in(mutant)
        failure = None if problem else tree.fails(mutant.check)
    except RuntimeError as error:
        return False, f"BROKEN: {error}"
    finally:
        tree.take_out()
    return failure is not None, problem or failure or f"NOT CAUGHT by {mutant.check}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name holds it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    lines = ["| fault | file | caught by |", "|---|---|---|"]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = Tree(Path(scratch))
        for mutant in chosen:
            is_caught, by = judge(tree, mutant)
            caught += is_caught
            lines.append(f"| {mutant.name} | `{mutant.changes[0].file}` | {by} |")
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    print(f"{caught} of {len(chosen)} faults caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
