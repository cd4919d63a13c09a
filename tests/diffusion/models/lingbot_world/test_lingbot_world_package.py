"""The package's exports are lazy and lead to the classes they name."""

import subprocess
import sys

import pytest

import vllm_omni.diffusion.models.lingbot_world as package

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

NAMES = [
    "CausalLingBotWorldTransformer3DModel",
    "LingBotWorldCausalDMDPipeline",
    "LingBotWorldConfig",
    "WanVAE",
]


def test_exports_lead_to_their_classes():
    """In a process of its own, where nothing has been imported yet."""
    code = (
        "import sys, vllm_omni.diffusion.models.lingbot_world as package\n"
        f"for name in {NAMES!r}:\n"
        "    assert name not in vars(package)\n"
        "    assert getattr(package, name).__name__ == name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="lingbot_world' has no attribute 'WanVAF'"):
        package.WanVAF  # noqa: B018


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys, vllm_omni.diffusion.models.lingbot_world as package\n"
        f"assert set({NAMES!r}) <= set(dir(package))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
