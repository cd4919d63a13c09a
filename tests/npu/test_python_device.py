"""Runs the checks on the Python ``npu`` device, in a process of their own.

The fallback where the genuine torch_npu on its simulated runtime has not been set up, for want of
a compiler or of its wheel. It shows nothing about an NPU's numbers, order of work or speed.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni import envs

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).with_name("check_npu.py")

pytestmark = [
    pytest.mark.advanced_model,
    pytest.mark.diffusion,
    pytest.mark.cpu,
    pytest.mark.skipif(
        (ROOT / ".venv-npu-sim" / ".installed").exists(),
        reason="the genuine torch_npu is set up here: make test-npu-sim",
    ),
]


def test_checks_on_the_python_device():
    variables = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",  # options of our own conftest, which is not read there
    }
    with envs.exported(variables):
        outcome = subprocess.run(
            [sys.executable, "-m", "pytest", str(CHECKS), "-q", "--noconftest",
             "-p", "no:cacheprovider", "-o", "python_files=check_*.py"],
            cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    declared = len(re.findall(r"^def test_", CHECKS.read_text(), re.MULTILINE))
    assert re.search(rf"\b{declared} passed", outcome.stdout)
