"""A name of vLLM's leads to what stands for it here, and what stands for it exists."""

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.deploy import KVSection, ModelSection, ParallelSection, SamplingSection
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.layers import ALIASES
from vllm_omni.config.resolve import resolve
from vllm_omni.config.schema import yaml_keys
from vllm_omni.config.vllm_names import INSTEAD, UNUSED, hint
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

SECTIONS = {
    "": {*yaml_keys(EngineArguments), *yaml_keys(ParallelSection), *ALIASES},
    "model_config": yaml_keys(ModelSection),
    "model_config.ar_diffusion_kv_config": yaml_keys(KVSection),
    "default_sampling_params": yaml_keys(SamplingSection),
}


@pytest.mark.parametrize("setting", sorted(set(INSTEAD.values())))
def test_what_stands_for_a_name_of_vllm_exists(setting):
    section, _, key = setting.rpartition(".")
    assert key in SECTIONS[section]


def test_a_name_is_either_replaced_or_unused():
    assert not UNUSED & set(INSTEAD)
    assert hint("ulyses_degree") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu_memory_utilization": 0.9},
         r"Unknown diffusion config field\(s\): 'gpu_memory_utilization' \(use "
         r"model_config\.ar_diffusion_kv_config\.gpu_memory_fraction\)$"),
        ({"max_model_len": 100}, r"'max_model_len' \(not used by this model\)$"),
        ({"max_num_sqs": 2}, r"'max_num_sqs' \(did you mean 'max_num_seqs'\?\)$"),
    ],
)  # fmt: skip
def test_keyword_arguments_of_vllm(tmp_path, given, message):
    model = str(write_fake_checkpoint(tmp_path / "model"))
    with pytest.raises(ConfigError, match=message):
        resolve(model, overrides=given)
