"""The rules of collection, checked by running pytest on small files; marks by hardware."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.mark import hardware_test

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

MARKED = """
import pytest

@pytest.mark.core_model
@pytest.mark.cpu
def test_core(): pass

@pytest.mark.advanced_model
@pytest.mark.cpu
def test_advanced(): pass

@pytest.mark.full_model
@pytest.mark.cpu
def test_full(): pass

@pytest.mark.core_model
@pytest.mark.cpu
@pytest.mark.soak
def test_soak(): pass
"""


@pytest.fixture
def project(pytester):
    """A project that has our pytest configuration, our conftest and nothing else."""
    root = Path(__file__).resolve().parents[2]
    shutil.copy(root / "pyproject.toml", pytester.path)
    shutil.copytree(
        root / "tests" / "helpers", pytester.path / "tests" / "helpers",
        ignore=shutil.ignore_patterns("test_*", "__pycache__"),
    )  # fmt: skip
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(root / "tests" / name, pytester.path / "tests")
    return pytester


def _run(project: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    (project.path / "tests" / "test_sample.py").write_text(source)
    return project.runpytest_subprocess(
        "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", *options
    )


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ((), 1),
        (("--run-level=advanced_model",), 2),
        (("--run-level=full_model",), 3),
        (("-m", "soak"), 1),
        (("-m", "core_model and not soak"), 1),
    ],
)
def test_level_and_soak_select(project, options, passed):
    _run(project, MARKED, *options).assert_outcomes(passed=passed, deselected=4 - passed)


@pytest.mark.parametrize("mark", ["core_model", "cpu", "diffusion"])
def test_a_test_without_level_or_hardware_is_refused(project, mark):
    result = _run(project, f"import pytest\n@pytest.mark.{mark}\ndef test_bare(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*each test needs a mark*", "*test_bare*"])


RETRIED = """
import pathlib
import pytest

def attempt(name):
    file = pathlib.Path(name)
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())

@pytest.mark.core_model
@pytest.mark.cpu
@pytest.mark.timing
def test_slow(): assert attempt("slow") > FAILURES

@pytest.mark.core_model
@pytest.mark.cpu
def test_exact(): assert attempt("exact") > EXACT_FAILURES
"""


@pytest.mark.parametrize(
    ("failures", "exact_failures", "workers", "passes"),
    [(0, 0, 0, True), (1, 0, 2, True), (2, 0, 2, False), (2, 0, 0, False), (0, 1, 0, False)],
)
def test_only_timing_is_retried_and_its_last_chance_fails_the_run(
    project, failures, exact_failures, workers, passes
):
    text = RETRIED.replace("EXACT_FAILURES", str(exact_failures)).replace("FAILURES", str(failures))
    result = _run(project, text, "--retry-timing", "-n", str(workers))
    assert (result.ret == pytest.ExitCode.OK) is passes
    retried = [line for line in result.outlines if "of 2 retries" in line]
    wanted = f"{failures} of 2 retries: tests/test_sample.py::test_slow"
    assert retried == ([wanted] if failures else [])
    assert len((project.path / "exact").read_text()) == 1


def _marks(res: dict[str, str], **options: object) -> dict[str, pytest.Mark]:
    def sample() -> None: ...

    return {mark.name: mark for mark in hardware_test(res, **options)(sample).pytestmark}


def test_cpu_always_runs():
    marks = _marks({"cpu": ""})
    assert set(marks) == {"cpu", "skipif"}
    assert marks["skipif"].args == (False,)


def test_an_absent_card_skips():
    marks = _marks({"cuda": "H100"}, num_cards=99)
    assert set(marks) == {"cuda", "gpu", "skipif"}
    assert marks["skipif"].args == (True,)


def test_cards_are_counted_for_each_platform():
    present = torch.cuda.device_count()
    marks = _marks({"cuda": "", "npu": ""}, num_cards={"cuda": present, "npu": 99})
    assert {"cuda", "npu", "gpu"} <= set(marks)
    assert marks["skipif"].args == (False,)


@pytest.mark.parametrize("res", [{}, {"rocm": "MI325"}])
def test_other_platforms_are_refused(res):
    with pytest.raises(ValueError, match="cpu, cuda and npu"):
        hardware_test(res)
