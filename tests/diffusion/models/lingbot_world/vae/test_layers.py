"""Norm, attention and resamplers against direct formulas."""

import pytest
import torch
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.columns import WHOLE_FRAME
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath, Preparable
from vllm_omni.diffusion.models.lingbot_world.vae.layers import (
    ChannelNorm,
    Downsampler,
    FrameAttention,
    Upsampler,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def randomised(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    module.to(dtype)
    for part in module.modules():
        if isinstance(part, Preparable):
            part.prepare(ConvPath.STACKED)
    return module


def test_norm_is_the_channel_direction_times_gamma():
    """Up to rounding of a few operations in float32."""
    norm = randomised(ChannelNorm(12, axes=3))
    x = torch.randn(2, 3, 4, 12)
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = 1e-20
    expected = F.normalize(x.double(), dim=-1) * 12**0.5 * norm.gamma.flatten().double()
    output = norm(x)
    torch.testing.assert_close(output, expected.float(), rtol=1e-6, atol=1e-7)
    assert output[0, 0, 0].count_nonzero() == 0


def test_norm_of_bfloat16_is_computed_in_float32():
    """One rounding: within half a unit in the last of bfloat16's eight bits."""
    norm = randomised(ChannelNorm(64, axes=2), torch.bfloat16)
    x = (torch.randn(1, 2, 3, 64) * 100).bfloat16()
    exact = F.normalize(x.double(), dim=-1) * 8.0 * norm.gamma.flatten().double()
    output = norm(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-6)


def test_attention_sees_one_frame_at_a_time():
    """Bitwise: a frame's result does not depend on the others."""
    attention = randomised(FrameAttention(8))
    x = torch.randn(3, 4, 5, 8)
    with torch.inference_mode():
        whole = attention(x)
        single = torch.cat([attention(frame) for frame in x.split(1)])
    assert torch.equal(whole, single)


def test_attention_equals_the_formula():
    """Up to reordering of float32 sums over 20 pixels and 8 channels."""
    attention = randomised(FrameAttention(8))
    x = torch.randn(1, 4, 5, 8)
    with torch.inference_mode():
        output = attention(x)
    normed = attention.norm(x).double().view(20, 8)
    weight, bias = attention.to_qkv.weight.double().view(24, 8), attention.to_qkv.bias.double()
    query, key, value = (normed @ weight.T + bias).chunk(3, dim=-1)
    mixed = (query @ key.T / 8**0.5).softmax(-1) @ value
    project = attention.proj.weight.double().view(8, 8)
    expected = mixed @ project.T + attention.proj.bias.double() + x.double().view(20, 8)
    torch.testing.assert_close(output.view(20, 8), expected.float(), rtol=1e-5, atol=1e-5)


def test_upsampler_first_call_keeps_the_frame_count_and_leaves_zeros():
    upsampler = randomised(Upsampler(4, temporal=True))
    x = torch.randn(1, 3, 5, 4)
    with torch.inference_mode():
        first, history = upsampler(x, None, WHOLE_FRAME)
        second, history_after = upsampler(x, history, WHOLE_FRAME)
    assert first.shape == (1, 6, 10, 2)
    assert history.shape == (2, 3, 5, 4)
    assert history.count_nonzero() == 0
    assert second.shape == (2, 6, 10, 2)
    assert torch.equal(history_after, torch.cat([history[1:], x]))


def test_upsampler_interleaves_halves_of_the_channels_in_time():
    upsampler = randomised(Upsampler(2, temporal=True))
    with torch.inference_mode():
        # Only the current frame matters, and channel c of the output is the constant c.
        upsampler.time_conv.weight.zero_()
        upsampler.time_conv.bias.copy_(torch.arange(4.0))
        upsampler.resample["1"].weight.zero_()
        upsampler.resample["1"].weight[0, :, 1, 1] = torch.tensor([1.0, 100.0])
        upsampler.resample["1"].bias.zero_()
        output, _ = upsampler(torch.randn(2, 3, 3, 2), torch.zeros(2, 3, 3, 2), WHOLE_FRAME)
    assert output[:, 2, 2, 0].tolist() == [100.0, 302.0, 100.0, 302.0]


def test_upsampler_repeats_pixels():
    upsampler = randomised(Upsampler(2, temporal=False))
    x = torch.randn(1, 2, 3, 2)
    with torch.inference_mode():
        upsampler.resample["1"].weight.zero_()
        upsampler.resample["1"].weight[0, 0, 1, 1] = 1.0
        upsampler.resample["1"].bias.zero_()
        output, history = upsampler(x, None, WHOLE_FRAME)
    expected = x[..., :1].repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    assert torch.equal(output, expected)
    assert history is None


def test_downsampler_first_call_passes_through_and_later_ones_halve_time():
    """Up to reordering of float32 sums; a call continues from the last frame of the one before."""
    down = randomised(Downsampler(4, temporal=True))
    clip = torch.randn(5, 6, 8, 4)
    with torch.inference_mode():
        first, history = down(clip[:1], None, WHOLE_FRAME)
        second, last = down(clip[1:], history, WHOLE_FRAME)
        spatial = F.conv2d(
            F.pad(clip, (0, 0, 0, 1, 0, 1)).permute(0, 3, 1, 2),
            down.resample["1"].weight,
            down.resample["1"].bias,
            stride=2,
        )
        halved = F.conv3d(
            spatial.permute(1, 0, 2, 3)[None],
            down.time_conv.weight,
            down.time_conv.bias,
            stride=(2, 1, 1),
        )
    torch.testing.assert_close(first[0], spatial[0].permute(1, 2, 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, halved[0].permute(1, 2, 3, 0), rtol=1e-5, atol=1e-5)
    assert torch.equal(history, first)
    assert last.shape == (1, 3, 4, 4)
