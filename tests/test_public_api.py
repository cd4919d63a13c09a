"""What users have written down: import paths, exported names, sub-commands. Frozen lists.

A change here is a change for users: say so in the release notes.
"""

from importlib import import_module

import pytest

import vllm_omni
from vllm_omni import envs
from vllm_omni.entrypoints.cli.main import COMMANDS

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

EXPORTS = {"AsyncOmni", "Omni", "__version__", "__version_tuple__"}
SUB_COMMANDS = {"bench", "completion", "demo", "plan", "serve", "tiny-checkpoint"}
IMPORT_PATHS = (
    ("vllm_omni.client", "SyncWorldClient"),
    ("vllm_omni.client", "WorldClient"),
    ("vllm_omni.diffusion.data", "DiffusionParallelConfig"),
    ("vllm_omni.diffusion.data", "OmniDiffusionConfig"),
    ("vllm_omni.diffusion.utils.media_utils", "finalize_streaming_video_bytes"),
    ("vllm_omni.entrypoints.cli.main", "main"),
    ("vllm_omni.errors", "OmniClientError"),
    ("vllm_omni.inputs.data", "OmniPromptType"),
    ("vllm_omni.inputs.data", "OmniSamplingParams"),
    ("vllm_omni.logger", "init_logger"),
    ("vllm_omni.version", "__version__"),
    ("vllm_omni.version", "__version_tuple__"),
)


def test_exported_names():
    assert set(vllm_omni.__all__) == EXPORTS
    assert set(dir(vllm_omni)) == EXPORTS


def test_the_classes_are_exported_by_entrypoints_too():
    from vllm_omni import entrypoints
    from vllm_omni.entrypoints import AsyncOmni, Omni

    assert (AsyncOmni, Omni) == (vllm_omni.AsyncOmni, vllm_omni.Omni)
    assert dir(entrypoints) == ["AsyncOmni", "Omni"]
    with pytest.raises(AttributeError, match="Omnibus"):
        entrypoints.__getattr__("Omnibus")


def test_the_platform_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "DEV", tmp_path)
    from vllm_omni.platforms import current_omni_platform

    assert current_omni_platform.device_type == current_omni_platform.name == "cpu"


def test_version_tuple_is_the_version():
    told = ".".join(map(str, vllm_omni.__version_tuple__))
    assert told == vllm_omni.__version__.replace("+", ".")
    assert all(isinstance(part, int) for part in vllm_omni.__version_tuple__[:3])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Omnibus"):
        vllm_omni.__getattr__("Omnibus")


def test_sub_commands():
    assert set(COMMANDS) == SUB_COMMANDS


def test_the_version_is_where_users_look_for_it():
    from vllm_omni import version

    assert version.__version__ == vllm_omni.__version__


@pytest.mark.parametrize(("module", "name"), IMPORT_PATHS)
def test_import_path(module, name):
    assert name in vars(import_module(module))
