"""The Python device with its operators, made when the first check of the process asks for it."""

from functools import cache

import pytest
import torch

from tests.npu import python_device, standin
from vllm_omni.platforms import Platform, create_platform


@cache
def _installed() -> None:
    standin.install()


@pytest.fixture
def platform() -> Platform:
    """The project's platform on the Python device; counters start at zero."""
    _installed()
    standin.calls.clear()
    python_device.transfers.clear()
    return create_platform("npu")


@pytest.fixture
def device(platform: Platform) -> torch.device:
    return platform.device(0)


def operator_calls(name: str) -> list[standin.Call]:
    """Calls of one operator so far."""
    return [call for call in standin.calls if call.name == name]
