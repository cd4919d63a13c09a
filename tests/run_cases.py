"""Runs the cases of a folder on this checkout: ``python -m tests.run_cases FOLDER [NAME ...]``.

A case is a folder with a ``run.py`` that ends with status 0 when the product is right. It finds
three variables: ``PROJECT`` (this checkout), ``VENV`` (its environment) and ``W``, a work folder
whose ``bugs`` holds the cases' own ``lib.py`` and what they share:

* ``tiny``, ``tinyr``: the tiny checkpoint, the latter outside of private folders;
* ``asuser.sh COMMAND``: runs a command as a user who may read everything and write almost nothing;
* ``rorun.sh COMMAND``: runs a command where no file can be written.

Both scripts need root.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_omni.tools.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
AS_USER = """#!/bin/sh
exec setpriv --reuid=12345 --regid=12345 --clear-groups \\
  --inh-caps=+dac_read_search --ambient-caps=+dac_read_search -- "$@"
"""
READ_ONLY = """#!/bin/sh
exec unshare --mount sh -c '
  for place in $(awk "{print \\$2}" /proc/mounts); do
    case $place in /proc*|/sys*) ;; *) mount -o remount,ro,bind "$place" 2>/dev/null ;; esac
  done
  exec "$@"' sh "$@"
"""


def prepare(work: Path, cases: Path) -> None:
    """Fill the folder that the cases share."""
    shared = work / "bugs"
    shared.mkdir()
    shared.chmod(0o777)
    shutil.copy(cases / "lib.py", shared)
    for name in ("tiny", "tinyr"):
        write_tiny_checkpoint(shared / name)
    for name, text in (("asuser.sh", AS_USER), ("rorun.sh", READ_ONLY)):
        (shared / name).write_text(text)
        (shared / name).chmod(0o755)


def run(case: Path, work: Path) -> bool:
    """Run one case and print what it said last; True if the product is right."""
    began = time.monotonic()
    variables = {"PROJECT": str(ROOT), "VENV": sys.prefix, "W": str(work)}
    try:
        done = subprocess.run(
            [sys.executable, str(case / "run.py")],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, output = 124, f"not finished after {LIMIT_S} s"
    last = (output.strip().splitlines() or ["nothing was said"])[-1]
    word, seconds = "pass" if status == 0 else "FAIL", time.monotonic() - began
    print(f"{word}  {case.name}  {seconds:.0f} s  {last}")
    if status != 0:
        print(output)
    sys.stdout.flush()
    return status == 0


def main() -> int:
    """Run all cases of the folder, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    found = sorted(file.parent for file in arguments.cases.glob("*/run.py"))
    chosen = [case for case in found if not arguments.names or case.name in arguments.names]
    if not chosen:
        parser.error(f"{arguments.cases} holds no such case; there are {[c.name for c in found]}")
    with tempfile.TemporaryDirectory(prefix="cases-") as folder:
        work = Path(folder)
        work.chmod(0o755)
        prepare(work, arguments.cases)
        results = [run(case, work) for case in chosen]
    print(f"{sum(results)} of {len(results)} cases are right")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
