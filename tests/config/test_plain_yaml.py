"""What YAML would read otherwise than it is written is refused, with its line."""

import pytest

from vllm_omni.config.deploy_file import load_deploy_file
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.errors import ConfigError
from vllm_omni.setting import settings_of

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def written(tmp_path):
    def write(text: str):
        path = tmp_path / "deploy.yaml"
        path.write_text(text)
        return path

    return write


def stage(value: str) -> str:
    return f"stages:\n  - stage_id: 0\n    env:\n      A: {value}\n"


@pytest.mark.parametrize(
    "value",
    ["010", "-010", "0x1F", "0b11", "1_000", "1:30", "190:20:30", "1_0.5", "1:30.5", "2024-01-01",
     "2024-01-01T00:00:00", "0o17", "0x_1"],
)  # fmt: skip
def test_a_number_that_is_not_plain_is_refused_or_text(written, value):
    path = written(stage(value))
    if value == "0o17":  # Not even YAML 1.1 takes it for a number.
        assert load_deploy_file(path).stage["env"] == {"A": value}
        return
    with pytest.raises(ConfigError, match="line 4") as refused:
        load_deploy_file(path)
    assert value in str(refused.value)


@pytest.mark.parametrize(
    ("value", "meant"),
    [("8", 8), ("-8", -8), ("0", 0), ("1.5", 1.5), (".5", 0.5), ("'010'", "010"),
     ('"1:30"', "1:30"), ("1e3", "1e3"), ("1.0e+3", 1000.0), ("a_b", "a_b"),
     ("'2024-01-01'", "2024-01-01")],
)  # fmt: skip
def test_plain_ones_and_texts_are_read(written, value, meant):
    assert load_deploy_file(written(stage(value))).stage["env"] == {"A": meant}


@pytest.mark.parametrize(
    "text",
    ["stages: &a\n  - stage_id: 0\n    env: {A: *a}\n", "base_config: &a [*a]\n",
     "stages:\n  - &a\n    stage_id: 0\n    env: *a\n"],
)  # fmt: skip
def test_an_anchor_that_holds_itself_is_refused(written, text):
    with pytest.raises(ConfigError, match=r"line .*holds itself"):
        load_deploy_file(written(text))


def test_an_anchor_that_is_used_twice_is_not(written):
    text = "stages:\n  - stage_id: 0\n    env: &e {A: b}\n    model_config: {env: *e}\n"
    assert load_deploy_file(written(text)).stage["env"] == {"A": "b"}


@pytest.mark.parametrize("depth", [2000, 100_000])
def test_depth_without_end_is_refused(written, depth):
    with pytest.raises(ConfigError):
        load_deploy_file(written("stages: " + "[" * depth))


@pytest.mark.parametrize(
    "variables", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0y"}, {"A": "\ud83d"}]
)
def test_what_no_environment_holds_is_refused(variables):
    env = next(one for name, one in settings_of(OmniDiffusionConfig) if name == "env")
    with pytest.raises(ConfigError, match="env"):
        env.checked(variables, "env")
