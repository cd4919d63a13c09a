"""Layers are read in any spelling, merge from the weakest to the strongest and keep origins."""

import warnings

import pytest

from vllm_omni.config.keys import COMMAND_LINE, Layer, merge_layers, read_layer
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.errors import ConfigError, ConfigTypeError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

SP = "parallel_config.sequence_parallel_size"
ULYSSES = "parallel_config.ulysses_degree"
RING = "parallel_config.ring_degree"


def read(raw, *, flat_wins=False, where="here", warn=False):
    return dict(read_layer(raw, "there", where=where, flat_wins=flat_wins, warn=warn).values)


def test_stronger_values_win_and_others_stay():
    merged = merge_layers([
        Layer("file", {"max_num_seqs": 1, "m.x": 1, "m.y": 1}),
        Layer("flag", {"m.y": 2, "devices": "0"}),
    ])  # fmt: skip
    assert merged.values == {"max_num_seqs": 1, "m.x": 1, "m.y": 2, "devices": "0"}
    assert merged.origins == {
        "max_num_seqs": "file", "m.x": "file", "m.y": "flag", "devices": "flag",
    }  # fmt: skip
    assert merged.hidden == (("m.y", "file", "flag"),)


def test_layers_are_not_changed_by_merging():
    below, above = {"x": 1}, {"x": 2}
    merge_layers([Layer("file", below), Layer("flag", above)])
    assert (below, above) == ({"x": 1}, {"x": 2})


@pytest.mark.parametrize(
    ("weak", "strong", "left"),
    [
        ({"ulysses_degree": 4, "sequence_parallel_size": 4}, {"ulysses_degree": 2}, {ULYSSES: 2}),
        ({"ulysses_degree": 4}, {"ulysses_degree": 2, "sequence_parallel_size": 3},
         {ULYSSES: 2, SP: 3}),
        ({"quantization": {"method": "ascend", "ignored_layers": ["a"]}}, {"quantization": "fp8"},
         {"quantization_config.method": "fp8"}),
        ({"env": {"A": "1", "B": 2}}, {"env": {"B": "3"}}, {"env.A": "1", "env.B": "3"}),
        ({"max_num_seqs": 2}, {"max_num_seqs": None}, {"max_num_seqs": 2}),
        ({"model_config": {"ar_diffusion_width": 96}},
         {"model_config": {"ar_diffusion_width": None}}, {"model_config.ar_diffusion_width": None}),
        ({"model_config": {"ar_diffusion_width": 96}}, {"model_config": {}},
         {"model_config.ar_diffusion_width": 96}),
    ],
)  # fmt: skip
def test_what_a_stronger_layer_leaves(weak, strong, left):
    assert merge_layers([Layer("a", read(weak)), Layer("b", read(strong))]).values == left


def test_flat_degrees_move_inside():
    raw = {"ulysses_degree": 2, "parallel_config": {"ulysses_degree": 4, "ring_degree": 1}}
    assert read(raw) == {ULYSSES: 4, RING: 1}
    assert read(raw, flat_wins=True) == {ULYSSES: 2, RING: 1}


def test_a_degree_object_states_all_degrees():
    given = read({"parallel_config": DiffusionParallelConfig(ulysses_degree=2)})
    assert given[ULYSSES] == 2
    assert given["parallel_config.tensor_parallel_size"] == 1
    assert given[SP] is given[RING] is None
    both = DiffusionParallelConfig(ulysses_degree=2, sequence_parallel_size=2)
    assert read({"parallel_config": both})[SP] == 2


def test_nulls_of_the_stage_count_as_not_given():
    assert read({"devices": None, "quantization": None, "ulysses_degree": None}) == {}


@pytest.mark.parametrize(
    "key", ["engine_args", "engine_extras", "runtime", "parallel_config", "model_config"]
)
def test_sections_must_be_mappings(key):
    with pytest.raises(ConfigTypeError, match=f'{key} must be a mapping .*, got "text"'):
        read({key: "text"})


@pytest.mark.parametrize(
    "raw",
    [
        {"max_batch_size": 1, "max_num_seqs": 2},
        {"quantization": "fp8", "diffusion_quantization_config": "fp8"},
        {"streaming_output": True, "diffusion_streaming_output": False},
        {"attention_config": {"backend": "sdpa"}, "attention_backend": "sdpa"},
    ],
)
def test_one_setting_under_two_names(raw):
    with pytest.raises(ConfigError, match="are two names of one setting"):
        read(raw)


def test_two_names_that_agree_are_fine():
    raw = {"streaming_output": True, "diffusion_streaming_output": True}
    assert read(raw) == {"streaming_output": True}


def test_older_names_are_reported_where_a_file_uses_them():
    with pytest.warns(
        FutureWarning, match="here: max_batch_size is the older name of max_num_seqs"
    ):
        read({"max_batch_size": 2}, warn=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read({"diffusion_streaming_output": True}, warn=True)
        read({"max_batch_size": 2})


def test_a_flag_is_named_as_it_was_typed():
    with pytest.raises(
        ConfigError, match=r"^command line: --max-num-seqs: must be at least 1, got 0"
    ):
        read({"max_num_seqs": 0}, where=COMMAND_LINE)
    with pytest.raises(
        ConfigError, match=r"^command line: chunk_timeout_s: must be above 0, got 0"
    ):
        read({"chunk_timeout_s": 0}, where=COMMAND_LINE)
