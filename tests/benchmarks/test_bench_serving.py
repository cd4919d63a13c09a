"""The benchmark of serving: its arithmetic on invented clocks, and one short run of everything."""

import json

import pytest

from benchmarks.lingbot_world import bench_serving
from benchmarks.lingbot_world.bench_serving import Figure, delivery_figures, parse_args
from benchmarks.lingbot_world.serving_probe import moving_frames

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, pytest.mark.timing]


def invented_clocks() -> dict[str, list[float]]:
    """Ten chunks, one a second: 100 ms of encoding (60 ms of CPU) and 2 ms of anything else.

    The ticker is late once: by 20 ms while chunk 5 is encoded.
    """
    ready = [float(index) for index in range(10)]
    ticks = [tick / 200.0 for tick in range(2000)]
    return {
        "ready_s": ready,
        "encode_s": [0.5, 0.5, *[0.1] * 8],
        "encode_cpu_s": [0.4, 0.4, *[0.06] * 8],
        "sent_s": [at + 0.1 + 0.002 + (0.4 if at < 2 else 0.0) for at in ready],
        "process_cpu_s": [index * 0.07 for index in range(10)],
        "ticks_s": [tick for tick in ticks if not 5.0 < tick < 5.025],
    }


def test_figures_of_invented_clocks():
    figures = {figure.name: figure.value for figure in delivery_figures(invented_clocks())}
    assert figures == pytest.approx({
        "ticker_gap_ms_median": 5.0,
        "ticker_gap_ms_p99": 5.0,
        "ticker_gap_ms_max": 25.0,
        "engine_overhead_ms_median": 2.0,
        "engine_overhead_ms_p99": 2.0,
        "encode_cpu_ms_per_chunk": 60.0,
        "delivery_cpu_ms_per_chunk": 10.0,
    }, abs=1e-6)  # fmt: skip


def test_goals_stand_beside_figures():
    assert Figure("a", 2.0, 3.0).as_json() == {"value": 2.0, "goal_at_most": 3.0, "met": True}
    assert Figure("a", 4.0, 3.0).as_json()["met"] is False
    assert Figure("a", 4.0).as_json()["met"] is None


@pytest.mark.parametrize("flags", ["--chunks 3", "--sessions 0"])
def test_senseless_flags(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(flags.split())
    assert caught.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_frames_move():
    frames = moving_frames(48, 64)
    assert (frames.shape, frames.dtype) == ((12, 48, 64, 3), "uint8")
    assert (frames[1, :, :-3] == frames[0, :, 3:]).all()


@pytest.mark.advanced_model
def test_a_short_run_prints_every_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output = tmp_path / "figures.json"
    flags = "--chunks 8 --height 64 --width 96 --chunk-ms 30 --sessions 1 --output-json"
    assert bench_serving.main([*flags.split(), str(output)]) == 0
    found = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert {name for name, figure in found["figures"].items() if figure["goal_at_most"]} == {
        "ticker_gap_ms_p99", "engine_overhead_ms_median", "engine_overhead_ms_p99",
        "start_to_ready_s", "ttfc_warm_ms_median",
    }  # fmt: skip
    # The system counts processor time in hundredths of a second.
    assert all(
        figure["value"] > 0 or name.startswith("worker_cpu")
        for name, figure in found["figures"].items()
    )
    assert {"cpu", "commit", "load_average"} <= set(found["environment"])
