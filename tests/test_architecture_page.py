"""The page on the architecture says what is: layers as they are enforced, paths that exist."""

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    """What stands below a heading of the page."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def words(line: str) -> list[str]:
    return [word.strip().removeprefix("vllm_omni.") for word in re.split("[:|,]", line)]


def test_the_layers_are_those_that_are_enforced():
    block = section("Who may import whom").split("```")[1]
    shown = [words(line) for line in block.strip().replace("\n    ", " ").split("\n")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [each["layers"] for each in contracts["contracts"] if each["type"] == "layers"]
    assert shown == [words(layer) for layer in layers]


def test_every_package_has_a_layer():
    block = section("Who may import whom").split("```")[1]
    held = {name.split(".")[0] for name in re.findall(r"[a-z_.]+", block)}
    modules = {path.stem for path in (ROOT / "vllm_omni").glob("[a-z]*.py")}
    packages = {path.parent.name for path in (ROOT / "vllm_omni").glob("*/__init__.py")}
    assert modules | packages <= held


def test_files_to_change_exist():
    text = section("Which file to change")
    paths = set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text))
    assert len(paths) > 15
    missing = [path for path in paths if not any((ROOT / top / path).exists() for top in
               ("", "vllm_omni"))]  # fmt: skip
    assert missing == []
