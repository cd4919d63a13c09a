"""A client that reads nothing stops its world soon, and nobody's memory grows by it."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from urllib.request import urlopen

import psutil
import pytest

from tests.deploy.haproxy import haproxy, needs_haproxy
from tests.helpers.local_server import wait_until
from tests.helpers.loopback import OnLoopback
from tests.helpers.server import ROOT, free_port
from tests.helpers.socket_client import picture_url, socket_client, start_message

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

LARGE = {"height": 320, "width": 576}
ENDLESS = start_message(
    num_frames=None, unbounded=True, image_reference={"image_url": picture_url(**LARGE)}, **LARGE
)
MOST_FRAMES = 10
RAW_BYTES = 12 * 320 * 576 * 3
MOST_GROWTH_BYTES = 10 * 2**20 + 2 * RAW_BYTES
"""Ten MiB beside the two chunks of pixels that may wait for any client."""


class Pod(OnLoopback):
    """A server of large frames in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.pod", str(self.port)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def answers(self) -> bool:
        try:
            return urlopen(f"{self.address}/health", timeout=5).status == HTTPStatus.OK
        except OSError:
            return False

    def count(self, metric: str) -> int:
        body = urlopen(f"{self.address}/metrics", timeout=5).read().decode()
        found = re.findall(rf"^vllm_omni:{metric}{{[^}}]*}} (\S+)$", body, re.MULTILINE)
        return int(sum(map(float, found)))

    @property
    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss


@contextmanager
def pod() -> Iterator[Pod]:
    made = Pod()
    try:
        wait_until(made.answers, patience_s=60.0)
        yield made
    finally:
        made.process.terminate()
        assert made.process.wait(20) == 0


async def check(url: str, server: Pod, growing: list) -> None:
    """Start a world and read nothing of its video until it has ended."""
    # The client's own library takes one message and no more off the socket.
    async with socket_client(url, max_queue=1) as client:
        await client.say(ENDLESS)
        await client.expect("video.start")
        # Encoder and buffers of a steady world are there after its first chunks.
        await asyncio.to_thread(
            wait_until, lambda: server.count("chunks_total") >= 3, patience_s=60.0
        )
        before = [process.resident_bytes for process in growing]
        await asyncio.to_thread(
            wait_until, lambda: server.count("requests_failed_total") == 1, patience_s=60.0
        )
        grown = [process.resident_bytes - old for process, old in zip(growing, before, strict=True)]
        made = server.count("chunks_total")
        assert (await client.error())["code"] == "client_too_slow"
        # The bound of ten is one of frames of a megabyte, as 832x480 has them at their worst.
        assert len(client.video) / client.log.count("binary") > 1e6
        assert client.log.count("binary") <= MOST_FRAMES
        assert made <= MOST_FRAMES + 2  # two more wait in the server
        assert max(grown) <= MOST_GROWTH_BYTES, grown


async def test_bare():
    with pod() as server:
        await check(server.url, server, [server])


@needs_haproxy
async def test_through_haproxy():
    with pod() as server:
        target = f"127.0.0.1:{server.port}"
        with haproxy(target, target) as proxy:
            await check(proxy.url, server, [server, proxy])
