"""One server for all tests of this folder, started as operators start it."""

import atexit
from contextlib import ExitStack
from functools import cache

import pytest

from tests.helpers.server import RealServer, real_server


@cache
def _shared_server() -> RealServer:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(real_server())


@pytest.fixture(scope="session")
def plain_server() -> RealServer:
    """The tiny checkpoint behind ``vllm-omni serve``; tests leave it as they found it."""
    return _shared_server()
