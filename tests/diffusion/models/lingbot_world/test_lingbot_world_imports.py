"""The model package gives its names lazily and pulls no library that it does not need."""

import subprocess
import sys

import pytest

import vllm_omni.diffusion.models.lingbot_world as package

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

EXPORTS = (
    "CausalLingBotWorldTransformer3DModel",
    "LingBotWorldCausalDMDPipeline",
    "LingBotWorldConfig",
    "WanVAE",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("name", EXPORTS)
def test_exported_names_exist(name):
    assert vars(type(package))  # a module, not a stand-in
    assert getattr(package, name).__name__ == name
    assert name in dir(package)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_what_the_api_process_imports_is_free_of_torch():
    name = "vllm_omni.diffusion.models.lingbot_world"
    assert run(f"import sys, {name}; print('torch' in sys.modules)") == "False"


def test_loading_a_model_pulls_no_library_of_models():
    heavy = ("diffusers", "vllm", "torchvision", "torch_npu", "av")
    loaded = run(
        "import sys, vllm_omni.diffusion.models.lingbot_world.load\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert loaded == "[]"
