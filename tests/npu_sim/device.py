"""Fixtures of checks on one simulated device, in eager and in deferred order."""

import pytest
import torch

from tests.npu_sim import simulation

simulation.hook()

import torch_npu  # noqa: E402, F401 - the device exists from here on

from tests.npu_sim import kernels, library  # noqa: E402
from vllm_omni.platforms import Platform, create_platform  # noqa: E402


@pytest.fixture(params=["eager", "deferred"])
def order(request) -> str:
    """Whether streams run at once or as late as they may; nothing is left behind either way."""
    simulation.runtime().set_deferred(on=request.param == "deferred")
    kernels.transfers.clear()
    kernels.calls.clear()
    yield request.param
    torch.npu.synchronize()
    simulation.runtime().set_deferred(on=False)
    assert not library.failures


@pytest.fixture
def deferred() -> None:
    """Streams run as late as they may."""
    simulation.runtime().set_deferred(on=True)
    yield
    torch.npu.synchronize()
    simulation.runtime().set_deferred(on=False)
    assert not library.failures


@pytest.fixture
def platform(order) -> Platform:
    del order
    return create_platform("npu")


@pytest.fixture
def device(platform) -> torch.device:
    return platform.device(0)


def operator_calls(name: str) -> list:
    """Calls of one of the vendor's operators so far."""
    return [call for call in kernels.calls if call.name == name]
