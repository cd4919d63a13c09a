"""The NPU platform on a machine that has none."""

import subprocess
import sys

import pytest

from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.errors import ConfigError
from vllm_omni.platforms import create_platform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(autouse=True)
def without_torch_npu(monkeypatch):
    """An import of torch_npu fails, whatever is installed."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)


def test_the_platform_says_what_is_missing_and_where_to_read():
    with pytest.raises(ConfigError, match=r"torch_npu and CANN.*recipes/lingbot_world_v2_npu.md"):
        create_platform("npu")


def test_the_backend_says_the_same():
    with pytest.raises(ConfigError, match="torch_npu and CANN"):
        create_attention_backend("npu_fusion")


EVERY_MODULE = """
import pkgutil, sys, importlib
import vllm_omni
for module in pkgutil.walk_packages(vllm_omni.__path__, "vllm_omni."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] in {"vllm", "ray", "triton"}, error
loaded = [name for name in sys.modules if name.split(".")[0] == "torch_npu"]
assert not loaded, loaded
import torch
assert "is_npu" not in vars(torch.Tensor)
"""


def test_importing_every_module_loads_no_torch_npu():
    outcome = subprocess.run(
        [sys.executable, "-c", EVERY_MODULE], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
