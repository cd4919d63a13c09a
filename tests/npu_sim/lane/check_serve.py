"""The server of four NPUs, as its recipe starts it, measured by the benchmark.

Nothing of the product is replaced: the interpreters of this test find simulated devices where
torch_npu looks for real ones.
"""

import io
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import av
import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from tests.npu_sim.processes import ROOT, TIMEOUT_S, environment

pytestmark = [
    pytest.mark.core_model, pytest.mark.omni, pytest.mark.parallel, pytest.mark.npu,
    pytest.mark.timeout(TIMEOUT_S),
]  # fmt: skip

CONFIGS = ROOT / "benchmarks/lingbot_world/configs"
BENCHMARK = ROOT / "benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py"
TINY = {"device": "npu", "model_config": {"ar_diffusion_height": 64, "ar_diffusion_width": 96}}
"""What the tiny checkpoint needs; the device is named because this machine has no nodes of it."""
CHUNKS = 2


def variables(order: str) -> dict[str, str]:
    return dict(os.environ) | environment(4, order=order)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def served(order: str, log: Path):
    """``vllm-omni serve`` until the block ends; its port."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve",
        str(tiny_checkpoint_dir()), "--omni", "--deploy-config",
        str(CONFIGS / "npu_usp4_eager.yaml"), "--stage-overrides", json.dumps({"0": TINY}),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, env=variables(order), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _await_ready(server, port, log)
            yield port
        finally:
            server.terminate()
            server.wait(60)


def _await_ready(server, port: int, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)


def benchmark(port: int, folder: Path, name: str) -> bytes:
    """The video of one complete run of the benchmark."""
    video = folder / f"{name}.mp4"
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--port", str(port), "--num-chunks", str(CHUNKS),
         "--width", "96", "--height", "64", "--seed", "7", "--save-video", str(video)],
        cwd=ROOT, env=variables("eager"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return video.read_bytes()


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two runs of the benchmark on a server of each order of work."""
    made = {}
    for order in ("eager", "deferred"):
        folder = tmp_path_factory.mktemp(order)
        with served(order, folder / "server.log") as port:
            made[order] = [benchmark(port, folder, name) for name in ("first", "second")]
    return made


@pytest.mark.parametrize("order", ["eager", "deferred"])
def test_two_runs_of_the_benchmark_give_the_same_file(videos, order):
    """Bitwise: the same world twice, from the noise to the bytes of the MP4."""
    first, second = videos[order]
    assert first == second
    with av.open(io.BytesIO(first)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 9 + 12 * (CHUNKS - 1)
    assert {(frame.width, frame.height) for frame in frames} == {(96, 64)}


def test_late_order_changes_no_byte(videos):
    """Bitwise: no wait, event or hold on memory is missing on any of the four devices."""
    assert videos["deferred"][0] == videos["eager"][0]
