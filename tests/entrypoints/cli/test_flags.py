"""Flags come from one table, leave no trace unless typed, and are checked by type."""

import argparse

import pytest

from vllm_omni.config.deploy import ParallelSection
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.layers import ALIASES
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.cli.flag_parser import Flag, add_flags, refuse_by_name, typed_values
from vllm_omni.entrypoints.cli.flags import FLAGS
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

WORDS = {
    "str": ["word"], "int": ["3"], "float": ["2.5"], "json": ['{"0": {}}'], "list": ["a", "b"],
    "switch": [], "off": [], "bool": [],
}  # fmt: skip
VALUES = {
    "str": "word", "int": 3, "float": 2.5, "json": {"0": {}}, "list": ["a", "b"],
    "switch": True, "off": False, "bool": True,
}  # fmt: skip


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    add_flags(parser, FLAGS)
    return parser


def words_of(flag):
    return [flag.choices[0]] if flag.choices else WORDS[flag.kind]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_each_spelling_sets_the_target_and_nothing_else(parser, flag):
    expected = flag.choices[0] if flag.choices else VALUES[flag.kind]
    for name in flag.names:
        for spelling in {name, name[:2] + name[2:].replace("-", "_")}:
            assert vars(parser.parse_args([spelling, *words_of(flag)])) == {flag.target: expected}


def test_nothing_typed_leaves_no_trace(parser):
    assert vars(parser.parse_args([])) == {}


def test_no_name_is_used_twice_and_every_target_exists():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    engine = {*EngineArguments.model_fields, *ParallelSection.model_fields, *ALIASES}
    server = set(ServerConfig.__dataclass_fields__)
    for flag in FLAGS:
        area, _, key = flag.target.partition(".")
        assert area in {"engine", "server", "serve", "refuse"}
        assert area != "engine" or key in engine, flag
        assert area != "server" or key in server, flag
        assert (area == "refuse") == (flag.refused is not None)


@pytest.mark.parametrize(
    "line",
    [
        "--no-such-flag",
        "--por 8000",  # no abbreviations
        "--usp two",
        "--ulysses-mode other",
        "--device tpu",
        "--stage-overrides {",
        "--stage-overrides",
        "--default-sampling-params x=1",
        "--diffusion-quantization-config fp8",
        "--flow-shift fast",
        "--ws-max-size 3",
    ],
)
def test_usage_errors_exit_2(parser, capsys, line):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(line.split())
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--no-trust-remote-code", {"trust_remote_code": False}),
        ("--no-ulysses-a2a-permute", {"ulysses_a2a_permute": False}),
        ("-tp 2 --usp=4", {"tensor_parallel_size": 2, "ulysses_degree": 4}),
        ("--log-stats --disable-log-stats", {"log_stats": False}),
    ],
)
def test_values_of_the_engine(parser, line, value):
    assert typed_values(parser.parse_args(line.split()), "engine") == value


def test_every_flag_is_explained(parser):
    text = " ".join(parser.format_help().split())
    for flag in FLAGS:
        assert flag.names[0] in text
        assert flag.help
    assert "--max_num_seqs" not in text


def test_help_tells_what_is_refused_or_without_effect():
    by_name = {name: flag for flag in FLAGS for name in flag.names}
    assert by_name["--enable-cpu-offload"].status == ("refused", "weights stay on their device")
    assert by_name["--omni-lb-policy"].status == ("no effect", "one worker group serves")
    assert by_name["--headless"].status == ("refused", "one worker group on this machine serves")
    assert by_name["--text-encoder-tp-size"].status[0] == "no effect"
    assert by_name["--port"].status is None
    assert by_name["--usp"].status is None
    assert "(refused: weights stay" in by_name["--enable-cpu-offload"].full_help


def test_refused_flags_pass_with_neutral_values_only():
    flags = [Flag(("--n",), "int", "refuse.n", "g", "h", refused="no replicas", neutral=(1,))]
    parser = argparse.ArgumentParser()
    add_flags(parser, flags)
    refuse_by_name(parser.parse_args([]), flags)
    refuse_by_name(parser.parse_args(["--n", "1"]), flags)
    with pytest.raises(ConfigError, match="--n 2 is refused: no replicas"):
        refuse_by_name(parser.parse_args(["--n", "2"]), flags)
