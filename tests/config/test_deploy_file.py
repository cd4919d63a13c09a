"""Deploy files are found, read strictly and inherited."""

import pytest

from vllm_omni.config.deploy_file import find_deploy_file, load_deploy_file
from vllm_omni.errors import ConfigError, ConfigNotFoundError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="deploy.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_a_bare_name_is_looked_up_among_the_packaged_files():
    found = find_deploy_file(load_deploy_file("lingbot_world_v2_stepwise.yaml").path)
    assert found.parts[-3:] == ("vllm_omni", "deploy", "lingbot_world_v2_stepwise.yaml")


@pytest.mark.parametrize("name", ["missing.yaml", "some/missing.yaml", "/missing.yaml"])
def test_a_missing_file(name):
    with pytest.raises(FileNotFoundError, match="Deploy config not found"):
        load_deploy_file(name)


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx: 1", "stages: &a [*a]x"])
def test_malformed_yaml_is_one_line(write, text):
    with pytest.raises(ConfigError, match="is not valid YAML") as error:
        load_deploy_file(write(text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- 1", "word", "1: 2"])
def test_a_file_that_is_not_a_mapping(write, text):
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_deploy_file(write(text))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("dtype: bfloat16\ndtype: float32\n", 2),
        ("stages:\n  - stage_id: 0\n    devices: '0'\n    devices: '1'\n", 4),
        ("stages:\n  - stage_id: 0\n    env: {A: x, 'A': y}\n", 3),
    ],
)
def test_a_key_given_twice(write, text, line):
    with pytest.raises(ConfigError, match=rf"line {line}: key .* is given twice"):
        load_deploy_file(write(text))


def test_python_tags_are_not_executed(write):
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_deploy_file(write("dtype: !!python/object/apply:os.getcwd []\n"))


def test_an_empty_file_and_an_empty_list_of_stages_are_the_default_stage(write):
    assert load_deploy_file(write("")).stage == {}
    assert load_deploy_file(write("stages: []")).stage == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [{devices: '0'}]", "each stage needs a stage_id"),
        ("stages: [{stage_id: 1}]", "unknown stage_id 1"),
        ("stages: [{stage_id: '0'}]", 'unknown stage_id "0"'),
        ("stages: [{stage_id: false}]", "unknown stage_id false"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", "listed twice"),
        ("stages: {stage_id: 0}", "stages: must be a list, got "),
        ("platforms: {npu: {stages: [{stage_id: 3}]}}", "platforms.npu: unknown stage_id 3"),
        ("platforms: {np: {}}", "unknown platform 'np'"),
        ("platforms: {npu: {stage: []}}", r"'stage' \(did you mean stages\?\)"),
        ("platforms: {npu: []}", r"platforms.npu: must be a mapping of names to values, got \[\]"),
        ("platforms: [npu]", "platforms: must be a mapping of names to values"),
        ("max_num_seqs: 2", r"'max_num_seqs' \(use max_num_seqs of the stage\)"),
        ("model_config: {}", r"'model_config' \(use model_config of the stage\)"),
        ("ar_diffusion_height: 64", r"\(use model_config.ar_diffusion_height of the stage\)"),
        ("port: 80", r"'port' \(the server alone has it: --port\)"),
        ("dtype: int4", 'dtype: must be auto, bfloat16, float16 or float32, got "int4"'),
        ("pipeline: qwen", 'pipeline: must be lingbot_world, got "qwen"'),
        ("stage_args: []", "stage_args=.* this schema was removed"),
        ("piepline: lingbot_world", r"'piepline' \(did you mean pipeline\?\)"),
        ("base_config: 3", "base_config must be a path"),
    ],
)
def test_what_a_file_may_not_say(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_deploy_file(write(text))


def test_stages_are_overlaid_field_by_field(write):
    write(
        "dtype: float32\n"
        "stages:\n"
        "- stage_id: 0\n"
        "  devices: '0'\n"
        "  max_num_seqs: 2\n"
        "  model_config: {ar_diffusion_height: 64, ar_diffusion_width: 96}\n"
        "  default_sampling_params: {seed: 1, extra_args: {flow_shift: 3.0, a: 1}}\n"
        "platforms: {npu: {stages: [{stage_id: 0, devices: '4', max_num_seqs: 3}]}}\n",
        "base.yaml",
    )
    loaded = load_deploy_file(
        write(
            "base_config: base.yaml\n"
            "stages:\n"
            "- stage_id: 0\n"
            "  devices: '1'\n"
            "  model_config: {ar_diffusion_height: 80}\n"
            "  default_sampling_params: {extra_args: {flow_shift: 5.0}}\n"
            "platforms: {npu: {stages: [{stage_id: 0, devices: '5'}]}}\n"
        )
    )
    assert loaded.top == {"dtype": "float32"}
    assert loaded.stage == {
        "stage_id": 0,
        "devices": "1",
        "max_num_seqs": 2,
        "model_config": {"ar_diffusion_height": 80},  # replaced as a whole
        "default_sampling_params": {"seed": 1, "extra_args": {"flow_shift": 5.0, "a": 1}},
    }
    assert loaded.platform_stages == {"npu": {"stage_id": 0, "devices": "5", "max_num_seqs": 3}}


def test_inheritance_in_a_circle(write):
    write("base_config: a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"in a circle.*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_deploy_file(write("base_config: b.yaml", "a.yaml"))


def test_a_missing_base_names_both_files(write):
    with pytest.raises(ConfigNotFoundError, match=r"gone\.yaml \(base_config of .*a\.yaml\)"):
        load_deploy_file(write("base_config: gone.yaml", "a.yaml"))


def test_a_dollar_is_a_character_like_any_other(write):
    loaded = load_deploy_file(write("stages: [{stage_id: 0, env: {A: '${dtype}'}}]"))
    assert loaded.stage["env"] == {"A": "${dtype}"}


def test_keys_of_the_top_level_without_effect_are_noted(write):
    loaded = load_deploy_file(write("async_chunk: true\nsession_mode: turn\nedges: [a]"))
    assert loaded.no_effect == (
        "async_chunk=true has no effect: there is one stage",
        'edges=["a"] has no effect: there is one stage',
    )
