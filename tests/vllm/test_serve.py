"""``vllm serve MODEL --omni``: vLLM's command line hands over to this package, which serves."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import av
import httpx
import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from tests.helpers.videos import FILES, FORM, SYNC
from tests.vllm.installed import requires_vllm

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.timeout(300),
    requires_vllm,
    pytest.mark.timing,
]

ROOT = Path(__file__).resolve().parents[2]
CPU_TINY = ROOT / "benchmarks/lingbot_world/configs/cpu_tiny.yaml"
START_S = 240.0


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """A server whose two worker processes share the weights, started by vLLM's own command."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(tiny_checkpoint_dir()), "--omni",
        "--host", "127.0.0.1", "--port", str(port), "--deploy-config", str(CPU_TINY),
        "--linear-backend", "vllm", "--tensor-parallel-size", "2",
    ]  # fmt: skip
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ, cwd=ROOT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, server, log)
        yield url
        server.send_signal(signal.SIGTERM)
        assert server.wait(40) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert "linears by vLLM" in log.read_text()


def wait_ready(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready in {START_S} s: {log.read_text()}")


def test_it_serves_a_video(address):
    answer = httpx.post(f"{address}{SYNC}", data=FORM, files=FILES, timeout=60)
    assert answer.status_code == 200, answer.text
    with av.open(io.BytesIO(answer.content)) as container:
        frames = list(container.decode(video=0))
    assert (len(frames), frames[0].width, frames[0].height) == (21, 96, 64)
