"""What must start fast starts without torch, measured in a fresh process.

CPU time is the process's own, so that a busy machine does not matter; the ceilings are at least
three times what an idle machine needs.
"""

import json
import subprocess
import sys

import pytest

from vllm_omni.entrypoints.cli.main import COMMANDS

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

IMPORT_CPU_S = 0.3
HELP_CPU_S = 1.0
HEAVY = ("torch", "transformers", "diffusers", "vllm", "av")
TORCH_FREE_PACKAGES = (
    "vllm_omni.config",
    "vllm_omni.engine",
    "vllm_omni.entrypoints.cli",
    "vllm_omni.entrypoints.server",
)

_REPORT = f"""
import json, sys, time
loaded = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps({{"loaded": loaded, "cpu_s": time.process_time()}}), file=sys.stderr)
"""

_HELP = """
import sys
from vllm_omni.entrypoints.cli.main import dispatch
try:
    dispatch({arguments!r})
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
"""

_WALK = """
import importlib, pkgutil
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    importlib.import_module(module.name)
"""


def _cost(code: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", code + _REPORT], capture_output=True, text=True, check=True
    )
    return json.loads(result.stderr.splitlines()[-1])


@pytest.mark.parametrize("code", ["vllm_omni; vllm_omni.__version__", "vllm_omni.entrypoints"])
def test_the_package_itself(code):
    cost = _cost(f"import {code}")
    assert cost["loaded"] == []
    assert cost["cpu_s"] < IMPORT_CPU_S


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command):
    arguments = ["--help"] if command is None else [command, "--help"]
    cost = _cost(_HELP.format(arguments=arguments))
    assert cost["loaded"] == []
    assert cost["cpu_s"] < HELP_CPU_S


@pytest.mark.parametrize("package", TORCH_FREE_PACKAGES)
def test_packages_of_the_api_process_load_no_torch(package):
    assert "torch" not in _cost(_WALK.format(package=package))["loaded"]


def test_the_measurement_sees_torch():
    assert _cost("import torch")["loaded"] == ["torch"]
