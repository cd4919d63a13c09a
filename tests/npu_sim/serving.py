"""``vllm-omni serve`` on simulated devices, or on the CPU of the same host, and its benchmark."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.npu_sim.processes import ROOT, TIMEOUT_S, environment

CONFIGS = ROOT / "benchmarks/lingbot_world/configs"
BENCHMARK = ROOT / "benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py"


@dataclass(frozen=True)
class Deployment:
    """One way to start the server.

    Attributes:
        file: the deploy file, which is not changed.
        devices: simulated devices of the host.
        overrides: what the checkpoint or the host needs other than the file says.
        flags: more of the command line.
        order: ``eager`` or ``deferred``.
        vae_path: how the VAE convolves, if not as the device would choose.
    """

    model: Path
    file: str
    devices: int
    overrides: dict[str, object]
    flags: list[str] = field(default_factory=list)
    order: str = "eager"
    vae_path: str | None = None

    def variables(self) -> dict[str, str]:
        return dict(os.environ) | environment(
            self.devices, order=self.order, vae_path=self.vae_path
        )

    @contextmanager
    def served(self, log: Path):
        """The server until the block ends; its port."""
        port = _free_port()
        command = [
            sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", str(self.model),
            "--omni", "--deploy-config", str(CONFIGS / self.file),
            "--stage-overrides", json.dumps({"0": self.overrides}), *self.flags,
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        with log.open("wb") as output:
            server = subprocess.Popen(
                command, cwd=ROOT, env=self.variables(), stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _await_ready(server, port, log)
                yield port
            finally:
                server.terminate()
                server.wait(60)

    def videos(self, folder: Path, *, runs: int, chunks: int, width: int) -> list[bytes]:
        """The files of complete runs of the benchmark, one after another."""
        folder.mkdir()
        with self.served(folder / "server.log") as port:
            return [
                self._benchmark(port, folder / f"{run}.mp4", chunks, width) for run in range(runs)
            ]

    def _benchmark(self, port: int, video: Path, chunks: int, width: int) -> bytes:
        run = subprocess.run(
            [sys.executable, str(BENCHMARK), "--port", str(port), "--num-chunks", str(chunks),
             "--width", str(width), "--height", "64", "--seed", "7", "--save-video", str(video)],
            cwd=ROOT, env=self.variables(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        return video.read_bytes()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _await_ready(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
