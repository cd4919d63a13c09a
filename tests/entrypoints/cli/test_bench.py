"""``bench`` runs the benchmark of the checkout with the flags as they are."""

import pytest

from vllm_omni.entrypoints.cli import bench
from vllm_omni.entrypoints.cli.main import dispatch

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize("line", ["bench --omni", "bench serve --omni", "--omni bench"])
def test_the_flags_are_those_of_the_benchmark(capfd, line):
    assert dispatch([*line.split(), "--help"]) == 0
    shown = capfd.readouterr().out
    assert "benchmark_lingbot_world_realtime.py" in shown
    assert "--playback-buffer-chunks" in shown


def test_the_status_is_that_of_the_benchmark(capfd):
    assert dispatch(["bench", "--omni", "--port", "1", "--num-chunks", "2"]) == 1
    assert "ERROR: cannot connect to ws://127.0.0.1:1/" in capfd.readouterr().err
    assert dispatch(["bench", "--omni", "--num-chunks", "0"]) == 2


def test_a_checkout_at_the_current_directory_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.vllm_omni, "__file__", str(tmp_path / "site" / "vllm_omni" / "x.py"))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / bench.PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text("import sys; sys.exit(len(sys.argv))")
    assert dispatch(["bench", "--omni", "a", "b"]) == 3


def test_without_a_checkout_it_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.vllm_omni, "__file__", str(tmp_path / "site" / "vllm_omni" / "x.py"))
    monkeypatch.chdir(tmp_path)
    assert dispatch(["bench", "--omni", "--port", "8000"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-omni bench: error: the benchmark is in the source checkout")
    assert str(tmp_path / "site") in line
