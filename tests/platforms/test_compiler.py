"""What compiling misses on a machine, and that the model then runs eagerly with one warning."""

import shutil
import sysconfig

import pytest

from tests.helpers.tiny import tiny_config
from vllm_omni import platforms
from vllm_omni.diffusion.models.lingbot_world.load import compile_where_possible

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture
def whole_machine(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(platforms, "find_spec", lambda name: name)
    return tmp_path


@pytest.mark.usefixtures("whole_machine")
def test_a_machine_that_has_everything_compiles(caplog):
    config = tiny_config(enforce_eager=False)
    assert compile_where_possible(config) is config
    assert not caplog.records


@pytest.mark.usefixtures("whole_machine")
def test_without_a_c_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert platforms.missing_for_compiling("cpu") == ("a C compiler (gcc or clang)",)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang" else None)
    assert platforms.missing_for_compiling("cpu") == ()
    monkeypatch.setenv("CC", "gcc-13")
    assert platforms.missing_for_compiling("cpu") == ("a C compiler (CC=gcc-13)",)


def test_without_headers_or_triton(whole_machine, monkeypatch):
    (whole_machine / "Python.h").unlink()
    monkeypatch.setattr(platforms, "find_spec", lambda _: None)
    headers = f"Python.h (in {whole_machine})"
    assert platforms.missing_for_compiling("cpu") == (headers,)
    assert platforms.missing_for_compiling("cuda") == (headers, "the package triton")


@pytest.mark.usefixtures("whole_machine")
def test_what_is_missing_is_told_once_and_blocks_run_eagerly(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    config = compile_where_possible(tiny_config(enforce_eager=False))
    assert config.enforce_eager
    (record,) = caplog.records
    assert "compiling needs a C compiler (gcc or clang), which is not here" in record.getMessage()
    assert compile_where_possible(config) is config
    assert len(caplog.records) == 1
