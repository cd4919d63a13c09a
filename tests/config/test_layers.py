"""Layers merge from the weakest to the strongest and keep the origin of each leaf."""

import pytest

from vllm_omni.config.layers import Layer, canonical_stage, merge_layers
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.errors import ConfigError, ConfigTypeError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def canonical(raw, *, flat_wins=False):
    return canonical_stage(raw, where="here", flat_wins=flat_wins, warn=False)


def test_stronger_leaves_win_and_others_stay():
    merged = merge_layers([
        Layer("file", {"a": 1, "m": {"x": 1, "deep": {"y": 1, "z": 1}}}),
        Layer("flag", {"m": {"deep": {"y": 2}}, "b": 3}),
    ])  # fmt: skip
    assert merged.values == {"a": 1, "b": 3, "m": {"x": 1, "deep": {"y": 2, "z": 1}}}
    assert merged.origins == {
        "a": "file", "b": "flag", "m.x": "file", "m.deep.y": "flag", "m.deep.z": "file",
    }  # fmt: skip
    assert merged.hidden == (("m.deep.y", "file", "flag"),)


def test_layers_are_not_changed_by_merging():
    below, above = {"m": {"x": 1}}, {"m": {"x": 2}}
    merge_layers([Layer("file", below), Layer("flag", above)])
    assert (below, above) == ({"m": {"x": 1}}, {"m": {"x": 2}})


def test_an_empty_mapping_says_nothing_but_a_plain_value_replaces_a_mapping():
    below = Layer("file", {"m": {"x": 1}})
    assert merge_layers([below, Layer("flag", {"m": {}})]).values == {"m": {"x": 1}}
    assert merge_layers([below, Layer("flag", {"m": 3})]).values == {"m": 3}
    assert merge_layers([Layer("flag", {"m": 3}), below]).values == {"m": {"x": 1}}


def test_a_quantisation_is_replaced_as_a_whole():
    merged = merge_layers([
        Layer("file", {"quantization_config": {"method": "ascend", "ignored_layers": ["a"]}}),
        Layer("flag", {"quantization_config": {"method": "fp8"}}),
    ])  # fmt: skip
    assert merged.values == {"quantization_config": {"method": "fp8"}}


def test_a_stronger_ulysses_degree_takes_the_sequence_parallel_size_with_it():
    below = Layer("file", {"parallel_config": {"ulysses_degree": 4, "sequence_parallel_size": 4}})
    above = Layer("flag", {"parallel_config": {"ulysses_degree": 2}})
    assert merge_layers([below, above]).values == {"parallel_config": {"ulysses_degree": 2}}
    both = Layer("flag", {"parallel_config": {"ulysses_degree": 2, "sequence_parallel_size": 3}})
    assert merge_layers([below, both]).values == both.values


def test_flat_degrees_move_inside():
    raw = {"ulysses_degree": 2, "parallel_config": {"ulysses_degree": 4, "ring_degree": 1}}
    assert canonical(raw) == {"parallel_config": {"ulysses_degree": 4, "ring_degree": 1}}
    assert canonical(raw, flat_wins=True)["parallel_config"]["ulysses_degree"] == 2
    assert canonical({"max_num_seqs": 1}) == {"max_num_seqs": 1}


def test_a_degree_object_states_all_degrees():
    nested = canonical({"parallel_config": DiffusionParallelConfig(ulysses_degree=2)})
    assert nested["parallel_config"]["tensor_parallel_size"] == 1
    assert "sequence_parallel_size" not in nested["parallel_config"]
    explicit = DiffusionParallelConfig(ulysses_degree=2, sequence_parallel_size=2)
    assert canonical({"parallel_config": explicit})["parallel_config"][
        "sequence_parallel_size"
    ] == 2  # fmt: skip


def test_nulls_count_as_not_given():
    assert canonical({"devices": None, "quantization": None}) == {}


@pytest.mark.parametrize("key", ["engine_args", "engine_extras", "runtime", "parallel_config"])
def test_sections_must_be_mappings(key):
    with pytest.raises(ConfigTypeError, match=f"{key} must be a mapping"):
        canonical({key: "text"})


@pytest.mark.parametrize(
    "raw",
    [
        {"max_batch_size": 1, "max_num_seqs": 1},
        {"quantization": "fp8", "diffusion_quantization_config": "fp8"},
        {"streaming_output": True, "diffusion_streaming_output": False},
    ],
)
def test_one_setting_under_two_names(raw):
    with pytest.raises(ConfigError, match="are two names of one setting"):
        canonical(raw)
