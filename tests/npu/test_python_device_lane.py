"""Runs the checks on the Python ``npu`` device, each file in a process of its own.

The device replaces a part of torch for its whole process, which other tests must not see. What
this lane shows: every branch for NPUs runs on tensors of that device, with operator arguments
that the vendor's schemas accept. It shows nothing about an NPU's numbers, order of work or speed.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni import envs

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[2]
CHECKS = sorted((Path(__file__).parent / "lane").glob("check_*.py"))


def run_checks(file: Path) -> subprocess.CompletedProcess[str]:
    with envs.exported({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}):
        return subprocess.run(
            [sys.executable, "-m", "pytest", str(file), "-q", "--noconftest",
             "-p", "no:cacheprovider", "-o", "python_files=check_*.py"],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip


@pytest.mark.parametrize("file", CHECKS, ids=lambda file: file.stem)
def test_checks_on_the_python_device(file):
    outcome = run_checks(file)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    declared = len(re.findall(r"^def test_", file.read_text(), re.MULTILINE))
    passed = re.search(r"(\d+) passed", outcome.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= declared > 0
