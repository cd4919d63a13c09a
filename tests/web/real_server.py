"""`vllm-omni serve` as a process of its own, for pages that want real video."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CONFIG = Path("benchmarks/lingbot_world/configs/cpu_tiny.yaml")
START_S = 90


class RealServer:
    """A server of a small model in a process group of its own.

    Args:
        packages: where Python finds a model that is not of this package.
    """

    def __init__(
        self, model: Path, log: Path, *, deploy: Path = CONFIG, packages: Path | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._model, self._deploy = model, deploy
        self._environment = {**os.environ}
        if packages is not None:
            self._environment["PYTHONPATH"] = str(packages)
        self._log = log
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start and wait until it is ready."""
        command = [
            sys.executable, "-c", "from vllm_omni.entrypoints.cli.main import main; main()",
            "serve", str(self._model), "--omni", "--deploy-config", str(self._deploy),
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """End all its processes at once, as an out-of-memory killer does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False
