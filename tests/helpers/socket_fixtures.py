"""Servers that tests of the socket share; import what is used, by name."""

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import NoImages, local_server
from vllm_omni.entrypoints.server.realtime_video import Timers

QUICK = Timers(stall=0.6, poll=0.05)
"""A client is stalled soon, and has all the time to start."""


@pytest.fixture
def server():
    """Two sessions at once."""
    with local_server(FakeExecutor(sessions=2)) as running:
        yield running


@pytest.fixture
def unpainted_server():
    """Pictures never come."""
    with local_server(images=NoImages()) as running:
        yield running
