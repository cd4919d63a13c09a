"""The live benchmark as a program, against a real server."""

import io
import json
import subprocess
import sys
from itertools import pairwise

import av
import pytest

from tests.helpers.server import ROOT, tiny_server

__all__ = ["tiny_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, pytest.mark.timing]

PROGRAM = "benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py"


def test_sixteen_chunks_with_video_and_json(tiny_server, tmp_path):
    video, report = tmp_path / "world.mp4", tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, PROGRAM, "--port", str(tiny_server.port), "--num-chunks", "16",
         "--save-video", video, "--output-json", report],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"Wrote {report}" in run.stdout
    frames = 9 + 12 * 15
    with av.open(io.BytesIO(video.read_bytes())) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert times == pytest.approx([index / 16 for index in range(frames)])
    text = report.read_text()
    found = json.loads(text)
    assert text == json.dumps(found, indent=2, sort_keys=True) + "\n"
    check_report(found)


def check_report(found: dict) -> None:
    assert set(found) >= {
        "benchmark", "timestamp", "endpoint", "model", "git_revision", "hostname", "workload",
        "config", "sessions", "metrics",
    }  # fmt: skip
    assert found["benchmark"] == "lingbot_world_realtime"
    assert set(found["workload"]) >= {
        "num_chunks", "num_frames", "width", "height", "fps", "seed", "flow_shift",
        "video_seconds", "prompt_updates",
    }  # fmt: skip
    assert set(found["config"]) >= {
        "sessions", "warmup_sessions", "warmup_chunks", "camera_pattern", "chunk_slo_ms",
        "target_fps", "mux_fps", "playback_buffer_chunks", "workload_file",
    }  # fmt: skip
    (session,) = found["sessions"]
    assert set(session) >= {"session_index", "request_id", "video_start_ms", "chunks", "metrics"}
    assert session["request_id"].startswith("video_stream-")
    chunks = session["chunks"]
    assert [chunk["index"] for chunk in chunks] == list(range(16))
    assert [chunk["num_frames"] for chunk in chunks] == [9] + [12] * 15
    assert all(chunk["byte_length"] > 0 for chunk in chunks)
    assert all(a["arrival_s"] < b["arrival_s"] for a, b in pairwise(chunks))
    metrics = found["metrics"]
    assert metrics["sessions"] == 1
    assert metrics["total_frames"] == 9 + 12 * 15
    assert metrics["steady_chunks"] == 10
    assert metrics["total_bytes"] == sum(chunk["byte_length"] for chunk in chunks)
    assert metrics["ttfc_ms"] == pytest.approx(chunks[0]["arrival_s"] * 1000)


def test_sessions_at_once(tiny_server, tmp_path):
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, PROGRAM, "--port", str(tiny_server.port), "--num-chunks", "3",
         "--width", "96", "--height", "64", "--concurrency", "2", "--output-json", report],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(report.read_text())["metrics"]["sessions"] == 2
