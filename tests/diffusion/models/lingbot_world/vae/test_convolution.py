"""Causal convolutions: both kernels against the library's on an explicitly padded clip."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.columns import WHOLE_FRAME
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import (
    CausalConv3d,
    ConvPath,
    Preparable,
    SpatialConv,
    TemporalConv,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

PATHS = list(ConvPath)


def randomised(module: nn.Module, path: ConvPath) -> nn.Module:
    """Give a module random weights of a size that keeps its output near one."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            parameter.normal_(0.0, fan_in**-0.5)
    assert isinstance(module, Preparable)
    module.prepare(path)
    return module


def library_form(clip: torch.Tensor) -> torch.Tensor:
    """``[time, height, width, channels]`` as ``[1, channels, time, height, width]``, float64."""
    return clip.double().permute(3, 0, 1, 2)[None]


def own_form(clip: torch.Tensor) -> torch.Tensor:
    return clip[0].permute(1, 2, 3, 0).float()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 4, 6, 3), (4, 5, 7, 16), (2, 9, 3, 5)])
def test_causal_conv_equals_a_front_padded_conv3d(path: ConvPath, shape: tuple[int, ...]):
    """Up to reordering: at most 27 * 16 products of size one, so 1e-6 each in float32."""
    conv = randomised(CausalConv3d(shape[-1], 6), path)
    clip = torch.randn(shape)
    with torch.inference_mode():
        output, history = conv(clip, None, WHOLE_FRAME)
    padded = F.pad(library_form(clip), (1, 1, 1, 1, 2, 0))
    expected = own_form(F.conv3d(padded, conv.weight.double(), conv.bias.double()))
    torch.testing.assert_close(output, expected, rtol=0, atol=5e-6)
    assert torch.equal(history, torch.cat([torch.zeros(2, *shape[1:]), clip])[-2:])


@pytest.mark.parametrize("path", PATHS)
def test_causal_conv_continues_where_it_stopped(path: ConvPath):
    """Bitwise, frame by frame: neighbours in time do not change a sum."""
    conv = randomised(CausalConv3d(8, 8), path)
    clip = torch.randn(7, 6, 10, 8)
    with torch.inference_mode():
        whole, _ = conv(clip, None, WHOLE_FRAME)
        history, parts = None, []
        for part in clip.split([1, 2, 4]):
            output, history = conv(part, history, WHOLE_FRAME)
            parts.append(output)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    assert torch.equal(history, clip[-2:])


def test_history_owns_only_its_own_memory():
    conv = randomised(CausalConv3d(4, 4), ConvPath.STACKED)
    with torch.inference_mode():
        _, history = conv(torch.randn(4, 6, 6, 4), None, WHOLE_FRAME)
    assert history.untyped_storage().nbytes() == history.nbytes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stride", "frames"), [(1, 3), (1, 6), (2, 3), (2, 5)])
def test_temporal_conv_equals_conv3d(path: ConvPath, stride: int, frames: int):
    """Up to reordering: 3 * 6 products of size one."""
    conv = randomised(TemporalConv(6, 10, stride=stride), path)
    clip = torch.randn(frames, 4, 5, 6)
    with torch.inference_mode():
        output = conv(clip)
    expected = F.conv3d(
        library_form(clip), conv.weight.double(), conv.bias.double(), stride=(stride, 1, 1)
    )
    torch.testing.assert_close(output, own_form(expected), rtol=0, atol=2e-6)


def test_spatial_conv_equals_conv2d():
    """Bitwise is not claimed: channels-last kernels may sum in another order."""
    conv = randomised(SpatialConv(6, 4), ConvPath.STACKED)
    clip = torch.randn(2, 8, 12, 6)
    with torch.inference_mode():
        output = conv(clip, (1, 1))
    expected = F.conv2d(
        clip.permute(0, 3, 1, 2).double(), conv.weight.double(), conv.bias.double(), padding=1
    )
    torch.testing.assert_close(output, expected.permute(0, 2, 3, 1).float(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("module", [CausalConv3d(6, 4), TemporalConv(6, 4, stride=1)])
def test_prepared_weights_share_the_parameters_memory(module: CausalConv3d | TemporalConv):
    conv = randomised(module, ConvPath.STACKED)
    name_and_shape = {name: tuple(p.shape) for name, p in conv.named_parameters()}
    kernel = conv._kernel
    assert name_and_shape["weight"][:3] == (4, 6, 3)
    assert kernel.weight.untyped_storage().data_ptr() == conv.weight.untyped_storage().data_ptr()
    # A later load by name reaches the kernel.
    conv.load_state_dict({"weight": torch.zeros_like(conv.weight), "bias": torch.ones(4)})
    assert kernel.weight.count_nonzero() == 0
    assert torch.equal(kernel.bias, torch.ones(4))


def test_auto_chooses_by_device():
    assert ConvPath.choose("auto", torch.device("cpu")) is ConvPath.STACKED
    assert ConvPath.choose("auto", torch.device("meta")) is ConvPath.CONV3D
    assert ConvPath.choose("conv3d", torch.device("cpu")) is ConvPath.CONV3D
    with pytest.raises(ValueError, match="fastest"):
        ConvPath.choose("fastest", torch.device("cpu"))


def test_unprepared_weights_are_not_used():
    with pytest.raises(AssertionError, match="prepare"):
        CausalConv3d(2, 2)(torch.zeros(1, 4, 4, 2), None, WHOLE_FRAME)
