"""An unknown flag is answered in one line by what the user may have meant."""

from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import main, serve
from vllm_omni.entrypoints.command_parser import CommandParser

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def parser():
    parser = CommandParser(prog="vllm-omni serve")
    serve.add_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("M --prot 1", "--prot (did you mean --port?)"),
        ("M --no-enforce-eagre", "--no-enforce-eagre (did you mean --no-enforce-eager?)"),
        ("M --gpu-memory-utilization 0.9",
         "--gpu-memory-utilization (use model_config.ar_diffusion_kv_config.gpu_memory_fraction in "
         "a deploy file)"),
        ("M --gpu_memory_utilization=0.9", "gpu_memory_fraction in a deploy file)"),
        ("M --max-model-len 100", "--max-model-len (not used by this model)"),
        ("M --tp 2", "--tp (use --tensor-parallel-size)"),
        ("M --seed 3", "--seed (use default_sampling_params.seed in a deploy file)"),
        ("M --attention-backend x", "--attention-backend (use --diffusion-attention-backend)"),
        ("M --quantization fp8", "--quantization (use --diffusion-quantization-config)"),
        ("M --devices 0,1", "--devices (use devices in a deploy file)"),
        ("M --lingbot-action-root x", "(use model_config.lingbot_action_root in a deploy file)"),
        ("--prot 1 --max-model-len 2 M",
         "--prot (did you mean --port?), --max-model-len (not used by this model)"),
        ("M --zzz", "unrecognized arguments: --zzz"),
        ("M other words", "unrecognized arguments: other words"),
    ],
)  # fmt: skip
def test_an_unknown_flag_gets_a_hint(parser, capsys, line, message):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(line.split())
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: vllm-omni serve [options]; 'vllm-omni serve --help' lists them"
    assert error.startswith("vllm-omni serve: error: unrecognized arguments: ")
    assert error.endswith(message)


def test_other_errors_take_two_lines_too(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["M", "--usp", "two"])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_line_without_mistakes_is_parsed(parser):
    assert vars(parser.parse_args(["M", "--port", "1"])) == {
        "serve.model_tag": "M", "server.port": 1,
    }  # fmt: skip


def test_an_interrupted_command_is_one_line_and_130(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "dispatch", interrupt)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "vllm-omni: interrupted\n"


VLLM_FLAGS = Path(__file__).parents[1] / "config/vllm_serve_flags.txt"
UNUSED = "not used by this model"
IN_A_FILE = "in a deploy file"
ANSWERS = {
    "attention-backend": "use --diffusion-attention-backend",
    "attention-config": "use --diffusion-attention-backend",
    "block-size": f"use model_config.ar_diffusion_kv_config.page_tokens {IN_A_FILE}",
    "gpu-memory-utilization":
        f"use model_config.ar_diffusion_kv_config.gpu_memory_fraction {IN_A_FILE}",
    "kv-cache-memory-bytes":
        f"use model_config.ar_diffusion_kv_config.gpu_memory_fraction {IN_A_FILE}",
    "load-format": "use --diffusion-load-format",
    "override-generation-config": "use --default-sampling-params",
    "quantization": "use --diffusion-quantization-config",
    "seed": f"use default_sampling_params.seed {IN_A_FILE}",
}  # fmt: skip
"""Flags of vLLM's that something stands for here; each answer was judged by a reader."""


def test_no_flag_of_vllm_gets_a_misleading_hint(parser):
    """What nothing stands for is answered by nothing that could send anybody astray."""
    flags = VLLM_FLAGS.read_text().split()
    unknown = [flag for flag in flags if flag not in parser._option_string_actions]
    assert len(unknown) > 150
    hints = {flag[2:]: parser._with_hint(flag).removeprefix(flag).strip(" ()") for flag in unknown}
    told = {flag: hint for flag, hint in hints.items() if hint not in {"", UNUSED}}
    assert told == ANSWERS
