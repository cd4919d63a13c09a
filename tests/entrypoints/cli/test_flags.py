"""Flags come from one table, leave no trace unless typed, and are checked by type."""

import argparse

import pytest

from vllm_omni.config.keys import KEYS, OTHER_FORMS, SECTIONS
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.cli.flags import FLAGS, add_flags, refuse_by_name, typed_values
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

WORDS = {
    str: ["word"], int: ["3"], float: ["2.5"], dict: ['{"0": {}}'], object: ['{"0": {}}'],
    tuple: ["a", "b"], bool: [],
}  # fmt: skip
VALUES = {
    str: "word", int: 3, float: 2.5, dict: {"0": {}}, object: {"0": {}}, tuple: ["a", "b"],
}  # fmt: skip


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_each_spelling_sets_the_target_and_nothing_else(parser, flag):
    setting = flag.setting
    words = [setting.words[0]] if setting.words else WORDS[setting.kind]
    for name in flag.names:
        expected = VALUES.get(setting.kind, not flag.is_negative(name))
        if setting.words:
            expected = setting.kind(setting.words[0])
        for spelling in {name, name[:2] + name[2:].replace("-", "_")}:
            assert vars(parser.parse_args([spelling, *words])) == {flag.target: expected}


def test_nothing_typed_leaves_no_trace(parser):
    assert vars(parser.parse_args([])) == {}


def test_no_name_is_used_twice_and_every_target_exists():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    engine = {*KEYS, *OTHER_FORMS, *(section[:-1] for section in SECTIONS)}
    server = set(ServerConfig.__dataclass_fields__)
    for flag in FLAGS:
        area, _, key = flag.target.partition(".")
        assert area in {"engine", "server", "serve", "refuse"}
        assert area != "engine" or key in engine, flag
        assert area != "server" or key in server, flag


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
        "--ssl-cert-reqs 3",
        "--dtype int4",
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
    ("line", "message"),
    [
        ("--usp two", 'argument --usp/--ulysses-degree: must be an integer, got "two"'),
        ("--usp 1_0", 'argument --usp/--ulysses-degree: must be an integer, got "1_0"'),
        ("--usp \u0662", "argument --usp/--ulysses-degree: must be an integer"),
        ("--flow-shift 1_0.5", 'argument --flow-shift: must be a number, got "1_0.5"'),
        ("--flow-shift fast", 'argument --flow-shift: must be a number, got "fast"'),
        ("--ulysses-mode x", 'argument --ulysses-mode: must be strict or advanced_uaa, got "x"'),
        ("--device tpu", 'argument --device: must be cpu, cuda or npu, got "tpu"'),
        ("--ssl-cert-reqs 3", "argument --ssl-cert-reqs: must be 0, 1 or 2, got 3"),
        ("--stage-overrides {", "argument --stage-overrides: must be JSON (Expecting property"),
    ],
)
def test_a_word_that_cannot_be_a_value_is_told_in_the_words_of_the_deploy_file(
    parser, capsys, line, message
):
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--no-trust-remote-code", {"trust_remote_code": False}),
        ("--no-ulysses-a2a-permute", {"parallel_config.ulysses_a2a_permute": False}),
        ("--device CPU --dtype BF16", {"device": "cpu", "dtype": "bfloat16"}),
        (
            "-tp 2 --usp=4",
            {
                "parallel_config.tensor_parallel_size": 2,
                "parallel_config.ulysses_degree": 4,
            },
        ),
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
    told = {name: flag.help for flag in FLAGS for name in flag.names}
    assert told["--enable-cpu-offload"] == "only false: weights stay on their device"
    assert told["--omni-lb-policy"] == (
        "no effect: the replica with the most free places takes the next session"
    )
    assert told["--headless"] == "refused: one worker group on this machine serves"
    assert told["--port"] == "port to listen on; 0 lets the system choose (default: 8000)"
    assert told["--max-queued"] == "sessions that may wait for a place (default: 16)"
    assert told["--stage-init-timeout"] == (
        "seconds for a worker to start; begins anew while weights arrive (default: 300)"
    )
    assert told["--no-web-page"] == "serve no page at /"


def test_flags_that_do_something_come_first():
    groups = list(dict.fromkeys(flag.group for flag in FLAGS))
    assert groups[-2:] == ["refused", "without effect"]


def test_refused_flags_pass_with_harmless_values_only(parser):
    refuse_by_name(parser.parse_args([]))
    refuse_by_name(parser.parse_args(["--api-server-count", "1"]))
    with pytest.raises(ConfigError, match="--api-server-count=2 is refused: sessions live in one"):
        refuse_by_name(parser.parse_args(["--api-server-count", "2"]))
    with pytest.raises(ConfigError, match="--headless=true is refused: "):
        refuse_by_name(parser.parse_args(["--headless"]))
