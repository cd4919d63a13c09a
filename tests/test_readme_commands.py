"""What README.md and the pages of docs/ tell a newcomer to type exists and works."""

import os
import re
import shlex
import subprocess
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.pages import blocks
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.utils.scenes import first_picture, gliding_path, write_camera_path
from vllm_omni.entrypoints.cli.main import COMMANDS

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines(first_word: str) -> list[str]:
    """Lines of all pages' shell blocks that start with a word."""
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.split("\n")]
    return [line for line in lines if line.split()[:1] == [first_word]]


def test_a_newcomer_needs_two_commands():
    assert blocks(ROOT / "README.md", "bash")[0].split("\n")[:-1] == ["make demo", "make test"]


def test_ci_runs_the_test_command_of_the_readme():
    assert "\nexec make test\n" in (ROOT / ".ci" / "run").read_text()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("line", sorted(set(command_lines("make"))))
def test_make_target_exists(line):
    assert would_run("--always-make", *shlex.split(line)[1:]) != ""


def would_run(*arguments: str) -> str:
    """What make would do, without doing it."""
    known = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert known.returncode == 0, known.stderr
    return known.stdout


TOOLS = "--editable '.[dev]'"


def test_the_demo_installs_no_tools_and_the_tests_add_them(tmp_path):
    venv = f"VENV={tmp_path}"
    for target in ("demo", "serve-demo"):
        first = would_run(venv, target)
        assert "--editable .\n" in first
        assert TOOLS not in first
    (tmp_path / ".installed").touch()  # what the demo leaves
    assert "pip" not in would_run(venv, "demo")
    then = would_run(venv, "unit")
    assert TOOLS in then
    assert "--editable .\n" not in then
    (tmp_path / ".installed-dev").touch()
    assert "pip" not in would_run(venv, "unit", "demo")
    os.utime(tmp_path / ".installed", (0, 0))  # older than pyproject.toml
    assert TOOLS in would_run(venv, "unit")


def test_torch_takes_arguments_of_its_own_for_pip(tmp_path):
    (arguments,) = re.findall(r"`make demo (TORCH_PIP='[^']+')`", (ROOT / "README.md").read_text())
    (argument,) = shlex.split(arguments)
    run = would_run(f"VENV={tmp_path}", argument, "demo")
    index = argument.partition("=")[2]
    assert f'pip install {index} "torch==' in run
    assert run.count(index) == 2  # once for torch, once in the line that says what comes
    assert index not in would_run(f"VENV={tmp_path}", "demo")


def test_an_error_does_not_pass_for_a_video():
    shell = "".join(block for page in PAGES for block in blocks(page, "bash"))
    calls = re.findall(r"^curl (?:.*\\\n)*.*$", shell, re.MULTILINE)
    saved = [call for call in calls if " -o " in call]
    assert len(saved) >= 2
    assert [call for call in saved if "--fail-with-body" not in call] == []


@pytest.mark.parametrize("line", sorted(set(command_lines("vllm-omni"))))
def test_command_line_is_understood(line):
    name, *arguments = [word for word in shlex.split(line)[1:] if word != "--omni"]
    module = import_module(COMMANDS[name].module)
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.fixture
def newcomer_folder(tmp_path, monkeypatch):
    """The files that the Python example speaks of, small."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL_DIR").symlink_to(tiny_checkpoint_dir())
    write_camera_path(tmp_path / "PATHS_DIR" / "glide", gliding_path(21))
    first_picture("day", height=64, width=96).save("first.png")
    return tmp_path


@pytest.mark.usefixtures("newcomer_folder")
def test_the_python_examples_make_a_video_whole_and_by_chunk():
    whole, by_chunk = blocks(ROOT / "README.md", "python")
    names: dict = {}
    exec(compile(at_tiny_size(whole), "README.md", "exec"), names)
    video = names["video"]
    assert video.shape == (21, 64, 96, 3)
    assert video.dtype == np.float32
    assert 0 <= video.min() < video.max() <= 1
    chunks: list = []
    watched = by_chunk.replace("\nomni.close", "\n    chunks.append(chunk)\nomni.close")
    exec(compile(watched, "README.md", "exec"), names | {"chunks": chunks})
    assert [chunk.shape for chunk in chunks] == [(9, 64, 96, 3), (12, 64, 96, 3)]
    # The same rollout: its uint8 pixels are the float ones, rounded.
    assert np.array_equal(np.concatenate(chunks), np.round(video * 255).astype(np.uint8))


def at_tiny_size(example: str) -> str:
    """The example for the real checkpoint, at the size that README.md names for the tiny one."""
    (tiny,) = re.findall(r"`(height=\d+, width=\d+)`", (ROOT / "README.md").read_text())
    assert tiny == "height=64, width=96"
    assert example.count("height=480, width=832") == 1
    return example.replace("height=480, width=832", tiny)


@pytest.mark.usefixtures("newcomer_folder")
def test_the_writer_example_writes_a_file():
    (example,) = blocks(ROOT / "docs" / "quickstart.md", "python")
    exec(compile(example, "quickstart.md", "exec"), {})
    assert Path("video.mp4").stat().st_size > 0
