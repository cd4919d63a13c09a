"""What users write into files, command lines and calls: a change here changes the product."""

from pathlib import Path

import pytest

from vllm_omni.config.deploy_file import TOP
from vllm_omni.config.keys import KEYS, SECTIONS, names_in
from vllm_omni.entrypoints.cli.flags import FLAGS

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

FROZEN = Path(__file__).parent / "frozen"
SHORT = {
    "": "stage.", "model_config.ar_diffusion_kv_config.": "kv_config.",
    "default_sampling_params.": "sampling.",
}  # fmt: skip


def frozen(name):
    return (FROZEN / name).read_text().split()


def test_yaml_keys():
    keys = list(TOP)
    keys += [f"{SHORT.get(one, one)}{name}" for one in SECTIONS for name in names_in(one)]
    assert sorted(keys) == frozen("yaml_keys.txt")


def test_keyword_arguments():
    """Every key of a stage is one, and so is every older spelling."""
    assert set(frozen("keyword_arguments.txt")) <= set(names_in(""))
    assert {key for key in KEYS if "." not in key} <= set(names_in(""))


def test_flags():
    assert sorted(name for flag in FLAGS for name in flag.names) == frozen("cli_flags.txt")
