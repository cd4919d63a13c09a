"""A real server for tests: ``vllm-omni serve`` on the tiny checkpoint in a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.helpers.loopback import OnLoopback
from tests.helpers.tiny import tiny_checkpoint_dir

ROOT = Path(__file__).parents[2]
CPU_TINY = ROOT / "benchmarks/lingbot_world/configs/cpu_tiny.yaml"
START_S = 240.0
"""A start takes under ten seconds; on a machine with twenty times as much to do, minutes."""
PLAIN = ("-c", "from vllm_omni.entrypoints.cli.main import main; raise SystemExit(main())", "serve")
"""What the console script runs."""
FAULTY = ("-m", "tests.helpers.faulty_serve")


class RealServer(OnLoopback):
    """A running server process.

    Attributes:
        ready_s: seconds from its start until ``/health`` said 200.
    """

    def __init__(
        self,
        log: Path,
        *flags: str,
        program: tuple[str, ...] = PLAIN,
        model: Path | None = None,
        deploy: Path | None = CPU_TINY,
        python_path: Path | None = None,
    ) -> None:
        self.log_path = log
        self.port = free_port()
        command = [sys.executable, *program, str(model or tiny_checkpoint_dir()), "--omni"]
        command += [] if deploy is None else ["--deploy-config", str(deploy)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        packages = {} if python_path is None else {"PYTHONPATH": str(python_path)}
        # Two threads that wait for each other on a busy machine take many times as long.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **packages}
        self._command, self._log = command, log.open("wb")
        self.start()

    def start(self) -> None:
        """Start it, perhaps once more on the same port."""
        self._began_s, self.ready_s = time.monotonic(), 0.0
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def log(self) -> str:
        """Everything that the server has written so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def api(self) -> psutil.Process:
        """The process that talks to clients."""
        return psutil.Process(self.process.pid)

    def health(self) -> int:
        """Status of ``/health``; 0 while nobody listens."""
        try:
            return self.get("/health")[0]
        except OSError:
            return 0

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry the labels."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            full, _, value = line.rpartition(" ")
            wanted = all(f'{key}="{text}"' in full for key, text in labels.items())
            if full.partition("{")[0] == f"vllm_omni:{name}" and wanted:
                total += float(value)
        return total

    def wait(self, condition: Callable[[], bool], what: str, patience_s: float = START_S) -> None:
        """Wait while the server lives."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert self.process.poll() is None, f"the server ended while {what}:\n{self.log}"
            assert time.monotonic() < deadline, f"gave up {what}:\n{self.log[-4000:]}"
            time.sleep(0.1)

    def wait_ready(self) -> None:
        """Wait until sessions can be served."""
        self.wait(lambda: self.health() == HTTPStatus.OK, "waiting for /health")
        self.ready_s = time.monotonic() - self._began_s

    def wait_idle(self) -> None:
        """Wait until no session is left."""
        idle = '{"server_load":0}'
        self.wait(lambda: self.get("/load")[1] == idle, "waiting for idleness")

    def terminate(self, patience_s: float = 30.0) -> int:
        """Send SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)

    def kill(self) -> None:
        """End all its processes at once, as an out-of-memory killer does."""
        for process in (self.api, *self.api.children(recursive=True)):
            process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it if it still runs; its whole family must be gone afterwards."""
        family = self.api.children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        _, alive = psutil.wait_procs(family, timeout=10)
        left = [process for process in alive if _runs(process)]
        assert not left, f"left running: {left}"


def _runs(process: psutil.Process) -> bool:
    """Whether it is more than a dead worker that a busy init process has yet to collect."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def real_server(
    *flags: str, program: tuple[str, ...] = PLAIN, wait: bool = True, **served: Path | None
) -> Iterator[RealServer]:
    """Serve until the block ends.

    Args:
        wait: for the engine to be ready.
        served: another model, its deploy file, and where Python finds it.
    """
    with TemporaryDirectory(prefix="server-log-") as folder:
        server = RealServer(Path(folder) / "log", *flags, program=program, **served)
        try:
            if wait:
                server.wait_ready()
            yield server
        finally:
            server.end()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@cache
def _shared_server() -> RealServer:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(real_server("--max-num-seqs", "2", program=FAULTY))


@pytest.fixture(scope="session")
def tiny_server() -> RealServer:
    """One server for all tests of a process that leave it as they found it; two sessions at once.

    Its workers fail on demand, see :mod:`tests.helpers.faulty_serve`.
    """
    return _shared_server()
