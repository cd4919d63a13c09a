"""The platform on the simulated device: figures, copies to the host, events, streams, 8 bits."""

import pytest
import torch

from tests.npu_sim import kernels, simulation
from tests.npu_sim.device import device, operator_calls, order, platform
from vllm_omni.diffusion.layers.linear import NATIVE, ReplicatedLinear
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Int8Ops

__all__ = ["device", "order", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

MEBIBYTE = 1 << 20


def test_it_names_the_device_and_its_backends(platform, device):
    assert (platform.name, platform.collective_backend) == ("npu", "hccl")
    assert platform.attention_backend == "npu_fusion"
    assert device == torch.device("npu", 0)
    assert torch.npu.current_device() == 0


def test_devices_that_are_not_there_are_refused(platform):
    with pytest.raises(ConfigError, match=r"needs device npu, but torch_npu sees \d+ NPUs"):
        platform.device(torch.npu.device_count())
    platform.device(0)


def test_free_memory_counts_what_the_allocator_can_give_back(platform, device):
    """The allocator takes memory by segments of 2 MiB."""
    before = platform.free_bytes(device)
    big = torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device=device)
    assert before - platform.free_bytes(device) == pytest.approx(64 * MEBIBYTE, abs=3 * MEBIBYTE)
    assert platform.peak_bytes(device) >= 64 * MEBIBYTE
    del big
    assert platform.free_bytes(device) == pytest.approx(before, abs=MEBIBYTE)


def test_pixels_leave_by_one_copy_that_is_complete(platform, device):
    """One event is waited for, no stream and not the device."""
    pixels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).to(device) + 1
    torch.npu.synchronize()
    kernels.transfers.clear()
    before = simulation.runtime().counts()
    host = platform.to_host(pixels)
    spent = simulation.runtime().counts() - before
    assert torch.equal(host, torch.arange(1, 25, dtype=torch.uint8).reshape(2, 3, 4))
    assert host.is_pinned()
    assert kernels.transfers == {"to_host": 1}
    assert spent["event_syncs"] == 1
    assert spent["stream_syncs"] == spent["device_syncs"] == 0


def test_pixels_that_left_do_not_change_when_more_leave(platform, device):
    first = platform.to_host(torch.zeros(1000, device=device))
    second = platform.to_host(torch.ones(1000, device=device))
    assert (first.sum(), second.sum()) == (0, 1000)


def test_leaving_pixels_wait_for_no_later_work(platform, device, order):
    pixels = torch.ones(8, device=device) * 3
    host = platform.to_host(pixels)
    later = pixels * 2
    assert simulation.runtime().pending() == (1 if order == "deferred" else 0)
    assert host.tolist() == [3.0] * 8
    assert later.cpu().tolist() == [6.0] * 8


def test_a_completion_event_tells_when_work_is_done(platform, device, order):
    y = torch.ones(8, device=device) * 3
    done = platform.completion_event(device)
    assert done.query() is (order == "eager")
    platform.synchronize(device)
    assert done.query()
    assert y.cpu().tolist() == [3.0] * 8


def quantised_linear(ops, device, *, fractal):
    draw = torch.Generator().manual_seed(1)
    layer = ReplicatedLinear(48, 32, torch.bfloat16, Int8LinearMethod(ops, fractal=fractal))
    layer.weight.data.copy_(torch.randn(32, 48, generator=draw))
    layer.bias.data.copy_(torch.randn(32, generator=draw))
    layer = layer.to(device)
    NATIVE.process(layer)
    NATIVE.process(layer)  # a second call changes nothing
    return layer, torch.randn(2, 5, 48, generator=draw).bfloat16().to(device)


@pytest.mark.parametrize("fractal", [True, False])
def test_a_quantised_linear_passes_the_vendors_schemas(platform, device, fractal):
    """Bitwise: the operators' bodies and the CPU reference are written independently."""
    layer, x = quantised_linear(platform.int8_ops(), device, fractal=fractal)
    casts = operator_calls("npu_format_cast")
    assert [(cast.arguments["acl_format"], cast.arguments["input"].size) for cast in casts] == [
        (29, (48, 32))
    ] * int(fractal)
    kernels.transfers.clear()
    output = layer(x)
    assert kernels.transfers == {}
    (product,) = operator_calls("npu_quant_matmul")
    # The binding turns torch's dtype into the vendor's number: 27 in its own list, 15 in torch's.
    assert product.arguments["output_dtype"] in {15, 27}
    reference, host_x = quantised_linear(Int8Ops(), "cpu", fractal=fractal)
    assert torch.equal(output.cpu(), reference(host_x))
