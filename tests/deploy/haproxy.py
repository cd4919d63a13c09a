"""A real HAProxy with the shipped configuration, in front of servers of the test."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.helpers.loopback import OnLoopback
from tests.helpers.server import ROOT, free_port

CONFIG = ROOT / "examples/online_serving/haproxy/haproxy.cfg"
needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed (Debian has it)"
)


class HAProxy(OnLoopback):
    """A running proxy.

    Attributes:
        process: the one process that it stays.
    """

    def __init__(self, folder: Path, pods: list[str]) -> None:
        self.port = free_port()
        self._admin = folder / "admin.sock"
        log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            ["haproxy", "-f", str(CONFIG)],
            env={
                "BIND": f"127.0.0.1:{self.port}",
                "ADMIN": str(self._admin),
                "POD_1": pods[0],
                "POD_2": pods[1],
                "PATH": "/usr/sbin:/usr/bin",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()

    @property
    def resident_bytes(self) -> int:
        """Memory of the proxy."""
        return psutil.Process(self.process.pid).memory_info().rss

    def tell(self, command: str) -> str:
        """The answer to a command of the run-time interface."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._admin))
            admin.sendall(f"{command}\n".encode())
            admin.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def states(self) -> dict[str, str]:
        """``UP``, ``DOWN`` and the like, by pod."""
        rows = (line.split(",") for line in self.tell("show stat").splitlines()[1:] if line)
        return {row[1]: row[17] for row in rows if row[0] == "pods" and row[1] != "BACKEND"}

    def wait(self, **states: str) -> None:
        """Wait until the pods are seen in these states."""
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline, "the proxy never saw the pods so"
            assert self.process.poll() is None, "the proxy ended"
            try:
                found = self.states()
            except OSError:
                found = {}
            if all(found.get(name, "").startswith(state) for name, state in states.items()):
                return
            time.sleep(0.05)


@contextmanager
def haproxy(*pods: str) -> Iterator[HAProxy]:
    """Run a proxy before two pods, each given as ``host:port``, until the block ends."""
    with TemporaryDirectory(prefix="hap-") as folder:
        proxy = HAProxy(Path(folder), list(pods))
        try:
            proxy.wait(pod1="UP", pod2="UP")
            yield proxy
        finally:
            proxy.process.terminate()
            proxy.process.wait(20)
