"""``bench`` is the live benchmark, with or without a checkout beside it."""

import pytest

from vllm_omni.entrypoints.cli.main import dispatch

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize("line", ["bench --omni", "bench serve --omni", "--omni bench"])
def test_the_flags_are_those_of_the_benchmark(capsys, line):
    with pytest.raises(SystemExit) as stop:
        dispatch([*line.split(), "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: vllm-omni bench" in shown
    assert "--playback-buffer-chunks" in shown


@pytest.mark.parametrize("word", [[], ["serve"]])
def test_the_status_is_that_of_the_benchmark(capsys, word):
    assert dispatch(["bench", "--omni", *word, "--port", "1", "--num-chunks", "2"]) == 1
    assert "ERROR: cannot connect to ws://127.0.0.1:1/" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--num-chunks 0", "--no-such-flag", "throughput"])
def test_a_senseless_line_exits_with_two(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        dispatch(["bench", "--omni", *flags.split()])
    assert stop.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err
