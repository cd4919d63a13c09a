"""What shells complete, asked from the shells themselves where they are installed."""

import os
import shutil
import subprocess

import pytest

from vllm_omni.entrypoints.cli.completion import options_of
from vllm_omni.entrypoints.cli.main import COMMANDS, dispatch

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CASES = [
    ("ser", {"serve"}),
    ("serve --deploy", {"--deploy-config"}),
    ("serve m --uvicorn-log-level war", {"warning"}),
    ("bench --camera-pattern ", {"forward", "hold", "orbit"}),
    ("bench s", {"serve"}),
    ("completion f", {"fish"}),
]
by_case = pytest.mark.parametrize(("line", "words"), CASES)


def script(capsys, shell):
    assert dispatch(["completion", shell]) == 0
    return capsys.readouterr().out


def asked(shell, *arguments, **environment):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def bash_call(line):
    typed = ["vllm-omni", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in typed)
    call = f"COMP_WORDS=({quoted}); COMP_CWORD={len(typed) - 1}; _vllm_omni"
    return f"{call}; printf '%s\\n' \"${{COMPREPLY[@]}}\""


@by_case
def test_bash(capsys, line, words):
    shown = asked("bash", "-c", f"{script(capsys, 'bash')}\n{bash_call(line)}")
    assert set(shown.split()) == words


def test_bash_leaves_file_names_to_itself_where_a_value_is_free(capsys):
    asks = "COMP_WORDS=(vllm-omni serve --deploy-config ''); COMP_CWORD=3; _vllm_omni"
    shown = asked("bash", "-c", f'{script(capsys, "bash")}\n{asks}; echo "${{#COMPREPLY[@]}}"')
    assert shown == "0\n"


@by_case
def test_fish(capsys, line, words):
    shown = asked("fish", "-N", "-c", f"{script(capsys, 'fish')}\ncomplete -C 'vllm-omni {line}'")
    assert words <= {row.split("\t")[0] for row in shown.split("\n")}


@by_case
def test_zsh(capsys, tmp_path, line, words):
    # zsh calls the function in sh's emulation, with words counted from 0.
    asks = f"emulate sh; {bash_call(line)}"
    text = f"{script(capsys, 'zsh')}\nprint -r -- $_comps[vllm-omni]; {asks}"
    registered, *shown = asked("zsh", "-f", "-c", text, ZDOTDIR=str(tmp_path)).split("\n")
    assert registered.endswith("-F _vllm_omni")
    begun = line.split(" ")[-1]  # zsh itself keeps to what begins so
    assert {word for word in shown if word and word.startswith(begun)} == words


def test_every_flag_that_the_help_shows_is_in_every_script(capsys):
    scripts = {shell: script(capsys, shell) for shell in ("bash", "fish")}
    flags = [
        name for command in COMMANDS for one in options_of(command) for name in one.option_strings
    ]
    assert len(flags) > 150
    assert [flag for flag in flags if flag not in scripts["bash"]] == []
    words = set(scripts["fish"].split())
    assert [flag for flag in flags if flag.lstrip("-") not in words] == []
