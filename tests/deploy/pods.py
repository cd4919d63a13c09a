"""A server of frames of noise in a process of its own, with its figures."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from urllib.request import urlopen

import psutil

from tests.helpers.local_server import wait_until
from tests.helpers.loopback import OnLoopback
from tests.helpers.server import ROOT, free_port
from tests.helpers.socket_client import picture_url, start_message


def large_world(bitrate: str, **length: object) -> dict[str, object]:
    """A start of 832x480; 9.5M are a megabyte of video for each of its chunks."""
    sides = {"height": 480, "width": 832}
    return start_message(
        image_reference={"image_url": picture_url(**sides)},
        extra_params={"video_codec_options": {"bitrate": bitrate}},
        **sides,
        **length,
    )


class Pod(OnLoopback):
    """A running ``tests.helpers.pod``.

    Attributes:
        process: the server's.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.pod", str(self.port)],
            cwd=ROOT,
            # Freed arrays go back to the system at once: it has no more than it holds.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        )

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            return urlopen(f"{self.address}/health", timeout=5).status == HTTPStatus.OK
        except OSError:
            return False

    def count(self, metric: str) -> int:
        """Sum of a counter over all its labels."""
        body = urlopen(f"{self.address}/metrics", timeout=5).read().decode()
        found = re.findall(rf"^vllm_omni:{metric}{{[^}}]*}} (\S+)$", body, re.MULTILINE)
        return int(sum(map(float, found)))

    @property
    def resident_bytes(self) -> int:
        """Memory of the server."""
        return psutil.Process(self.process.pid).memory_info().rss


@contextmanager
def pod() -> Iterator[Pod]:
    """Run one until the block ends."""
    made = Pod()
    try:
        wait_until(made.answers, patience_s=120.0)
        yield made
    finally:
        made.process.terminate()
        assert made.process.wait(20) == 0
