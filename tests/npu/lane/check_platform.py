"""The NPU platform on the Python device."""

import pytest
import torch

from tests.npu import python_device
from tests.npu.lane.device import device, operator_calls, platform
from vllm_omni.diffusion.layers.linear import ReplicatedLinear, process_weights
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.int8 import ReferenceInt8Ops

__all__ = ["device", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def test_it_names_what_an_npu_uses(platform, device):
    assert (platform.name, platform.collective_backend) == ("npu", "hccl")
    assert platform.attention_backend == "npu_fusion"
    assert (device.type, device.index) == ("npu", 0)
    assert platform.free_bytes(device) == 60 << 30
    assert platform.peak_bytes(device) == 1 << 20


def test_an_npu_that_is_not_there_is_refused_with_what_to_look_at(platform):
    with pytest.raises(ConfigError, match=r"rank 64 needs device npu, .* sees \d+ NPUs; check"):
        platform.device(64)


def test_pixels_leave_by_one_copy(platform, device):
    pixels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).to(device)
    python_device.transfers.clear()
    host = platform.to_host(pixels)
    assert host.device.type == "cpu"
    assert torch.equal(host, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))
    assert python_device.transfers == {"to_host": 1}


def quantised_linear(method, device, *, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(1)
    layer = ReplicatedLinear(48, 32, dtype, method)
    layer.weight.data.copy_(torch.randn(32, 48, generator=draw))
    layer.bias.data.copy_(torch.randn(32, generator=draw))
    layer = layer.to(device)
    x = torch.randn(2, 5, 48, generator=draw).to(dtype).to(device)
    return layer, x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quantised_linear_calls_the_operators_by_their_schemas(platform, device, dtype):
    """Bitwise: the operators' bodies and the CPU reference are written independently."""
    layer, x = quantised_linear(Int8LinearMethod(platform.int8_ops(), fractal=True), device,
                                dtype=dtype)  # fmt: skip
    process_weights(layer)
    process_weights(layer)  # a second call changes nothing
    (cast,) = operator_calls("npu_format_cast")
    assert cast.arguments["acl_format"] == 29
    assert cast.arguments["input"].shape == (48, 32)
    assert python_device_allows_tiles()
    output = layer(x)
    (quantised,) = operator_calls("npu_dynamic_quant")[1:]
    assert quantised.arguments["input"].shape == (10, 48)
    (product,) = operator_calls("npu_quant_matmul")
    given = product.arguments
    assert (given["x1"].dtype, given["x2"].dtype) == (torch.int8, torch.int8)
    assert given["scale"].dtype == given["pertoken_scale"].dtype == torch.float32
    assert given["output_dtype"] == {torch.float16: 5, torch.bfloat16: 15}[dtype]
    assert "weight" not in dict(layer.named_parameters())
    reference, host_x = quantised_linear(
        Int8LinearMethod(ReferenceInt8Ops(), fractal=True), torch.device("cpu"), dtype=dtype
    )
    process_weights(reference)
    assert torch.equal(output.cpu(), reference(host_x))


def python_device_allows_tiles() -> bool:
    from vllm_omni.platforms.npu import load_torch_npu

    return load_torch_npu().npu.config.allow_internal_format


def test_plain_layout_casts_nothing(platform, device):
    layer, x = quantised_linear(Int8LinearMethod(platform.int8_ops(), fractal=False), device)
    process_weights(layer)
    assert operator_calls("npu_format_cast") == []
    assert layer(x).device.type == "npu"
