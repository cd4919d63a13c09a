"""The command finds its sub-command wherever ``--omni`` stands and leaves the rest to vLLM."""

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from vllm_omni import __version__
from vllm_omni.entrypoints.cli.main import COMMANDS, Command, dispatch
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def echo_command(monkeypatch):
    """A command ``serve`` that prints its arguments; vLLM has one of the same name."""
    module = ModuleType("echo_command", "Print the arguments.")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs="*")

    def run(args: argparse.Namespace) -> int:
        if args.words == ["bad"]:
            raise ConfigError("bad word")
        print("ours:", *args.words)
        return 3

    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, "echo_command", module)
    command = Command("echo_command", "print", shared_with_vllm=True)
    monkeypatch.setitem(COMMANDS, "serve", command)


@pytest.mark.parametrize(
    "line", ["--omni serve a b", "serve --omni a b", "serve a b --omni", "serve --omni a --omni b"]
)
@pytest.mark.usefixtures("echo_command")
def test_omni_may_stand_anywhere(capsys, line):
    assert dispatch(line.split()) == 3
    assert capsys.readouterr().out == "ours: a b\n"


@pytest.mark.usefixtures("echo_command")
def test_our_errors_are_one_line_and_exit_1(capsys):
    assert dispatch(["serve", "--omni", "bad"]) == 1
    assert capsys.readouterr().err == "vllm-omni serve: error: bad word\n"


def test_without_a_command_the_help_is_printed(capsys):
    assert dispatch([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and command.summary in shown for name, command in COMMANDS.items())


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch(["--omni", flag])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_with_omni_names_the_known_ones(capsys):
    assert dispatch(["no-such-command", "--omni"]) == 2
    message = capsys.readouterr().err
    assert "no-such-command" in message
    assert "tiny-checkpoint" in message


def _run_main(*argv: str, pythonpath: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *argv],
        env=os.environ | {"PYTHONPATH": pythonpath},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_itself_can_be_run():
    line = [sys.executable, "-m", "vllm_omni", "--version"]
    assert subprocess.run(line, capture_output=True, text=True).stdout.strip() == __version__


def test_unknown_flag_exits_2():
    result = _run_main("tiny-checkpoint", "--no-such-flag", "somewhere")
    assert result.returncode == 2
    assert "--no-such-flag" in result.stderr


def test_a_line_without_omni_goes_to_vllm_untouched(tmp_path):
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        "import sys\ndef main():\n    print('theirs:', *sys.argv[1:])\n    sys.exit(5)\n"
    )
    result = _run_main("serve", "model", "--port", "9", pythonpath=str(tmp_path))
    assert (result.returncode, result.stdout) == (5, "theirs: serve model --port 9\n")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.usefixtures("echo_command")
def test_a_line_without_omni_is_ours_where_vllm_is_not_installed(capsys):
    assert dispatch(["serve", "model"]) == 3
    assert capsys.readouterr().out == "ours: model\n"
    assert dispatch(["chat"]) == 2
    assert "no command 'chat'" in capsys.readouterr().err


def test_writing_a_checkpoint_from_the_command_line(tmp_path, capsys):
    assert dispatch(["tiny-checkpoint", str(tmp_path / "tiny")]) == 0
    assert (tmp_path / "tiny" / "model_index.json").is_file()
    assert "noise" in capsys.readouterr().out
    assert dispatch(["tiny-checkpoint", str(tmp_path / "tiny")]) == 0
    assert "already there" in capsys.readouterr().out
    (tmp_path / "tiny" / "model_index.json").write_text("{}")
    assert dispatch(["tiny-checkpoint", str(tmp_path / "tiny")]) == 1
    assert "--force" in capsys.readouterr().err
    assert dispatch(["tiny-checkpoint", str(tmp_path / "tiny"), "--force"]) == 0
