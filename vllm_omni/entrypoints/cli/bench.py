"""Runs the live benchmark of the source checkout: ``vllm-omni bench --omni [serve] FLAGS``."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import vllm_omni
from vllm_omni.errors import ConfigError

PROGRAM = Path("benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py")


def run_line(arguments: Sequence[str]) -> int:
    """Hand all flags to the benchmark; returns its exit status.

    The word ``serve`` of vLLM's command of this name may stand in front of them: a running server
    is all that is measured here.

    Raises:
        ConfigError: if there is no checkout beside the package or at the current directory.
    """
    flags = arguments[1:] if arguments[:1] == ["serve"] else arguments
    return subprocess.run([sys.executable, str(_find()), *flags], check=False).returncode


def _find() -> Path:
    checkouts = (Path(vllm_omni.__file__).parents[1], Path.cwd())
    for checkout in checkouts:
        if (checkout / PROGRAM).is_file():
            return checkout / PROGRAM
    raise ConfigError(
        f"the benchmark is in the source checkout, not in the installed package; there is no "
        f"{PROGRAM} in {' or '.join(str(checkout) for checkout in checkouts)}. Run this from a "
        "checkout"
    )
