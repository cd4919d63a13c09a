"""What users write into files, command lines and calls: a change here changes the product."""

from pathlib import Path

import pytest

from vllm_omni.config.deploy import (
    KVSection,
    ModelSection,
    ParallelSection,
    QuantizationSection,
    SamplingSection,
)
from vllm_omni.config.deployment import DeploySection, EngineArguments
from vllm_omni.config.layers import OTHER_SPELLINGS
from vllm_omni.config.schema import yaml_keys
from vllm_omni.config.stage import StageSection
from vllm_omni.entrypoints.cli.flags import FLAGS

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

FROZEN = Path(__file__).parent / "frozen"


def frozen(name):
    return (FROZEN / name).read_text().split()


def test_yaml_keys():
    sections = {
        "": DeploySection, "stage.": StageSection, "parallel_config.": ParallelSection,
        "model_config.": ModelSection, "kv_config.": KVSection,
        "quantization_config.": QuantizationSection, "sampling.": SamplingSection,
    }  # fmt: skip
    keys = [f"{prefix}{key}" for prefix, section in sections.items() for key in yaml_keys(section)]
    keys += [f"stage.{key}" for key in OTHER_SPELLINGS]
    assert sorted(keys) == frozen("yaml_keys.txt")


def test_keyword_arguments():
    assert sorted(yaml_keys(EngineArguments)) == frozen("keyword_arguments.txt")


def test_flags():
    assert sorted(name for flag in FLAGS for name in flag.names) == frozen("cli_flags.txt")
