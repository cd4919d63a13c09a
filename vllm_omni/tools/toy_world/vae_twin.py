"""A trainable twin of the product's VAE: same tensor names, same arithmetic, whole clips at once.

The product's modules keep detached kernels and write in place, so nothing can learn through them.
Activations are ``[batch, channels, time, height, width]``. A causal convolution over a whole clip
with zeros in front equals the product's convolution with its history, frame by frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Clip = Float[Tensor, "_batch _channels _time _height _width"]


@dataclass(frozen=True, slots=True)
class VaeShape:
    """The fields of ``vae/config.json`` that shape the network."""

    base_dim: int = 8
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 6)
    num_res_blocks: int = 1
    temperal_downsample: tuple[bool, ...] = (False, True, True)


def _weight(outputs: int, inputs: int, *kernel: int) -> nn.Parameter:
    weight = torch.empty(outputs, inputs, *kernel)
    nn.init.kaiming_uniform_(weight, a=1.0)
    return nn.Parameter(weight)


class _Norm(nn.Module):
    def __init__(self, channels: int, axes: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes))

    def forward(self, x: Clip) -> Clip:
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
        scale = x.shape[1] ** 0.5 / length.clamp_min(1e-12)
        return x * scale.to(x.dtype) * self.gamma.view(1, -1, 1, 1, 1).to(x.dtype)


class _Conv(nn.Module):
    """A causal convolution; pictures (one frame) see zeros before them."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int]) -> None:
        super().__init__()
        self.weight, self.bias = (
            _weight(outputs, inputs, *kernel),
            nn.Parameter(torch.zeros(outputs)),
        )
        if kernel[0] == 3:
            with torch.no_grad():  # begins as a network of single pictures: the present tap alone
                self.weight[:, :, :2] = 0
                self.weight *= 3**0.5

    def forward(self, x: Clip) -> Clip:
        taps, size = self.weight.shape[2], self.weight.shape[3]
        if x.shape[2] == 1:
            y = F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=size // 2)
            return y.unsqueeze(2)
        x = F.pad(x, (0, 0, 0, 0, taps - 1, 0))
        return F.conv3d(x, self.weight, self.bias, padding=(0, size // 2, size // 2))


class _FrameConv(nn.Module):
    """A convolution of single frames."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            _weight(outputs, inputs, kernel, kernel),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Clip, stride: int = 1, padding: int = 0) -> Clip:
        frames = x.transpose(1, 2).flatten(0, 1)
        y = F.conv2d(frames, self.weight, self.bias, stride=stride, padding=padding)
        return y.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class _TimeConv(nn.Module):
    """Three taps in time; begins by holding the present frame."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.zeros(outputs, inputs, 3, 1, 1)
        for output in range(outputs):
            weight[output, output % inputs, 2] = 1
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Clip, stride: int = 1) -> Clip:
        return F.conv3d(x, self.weight, self.bias, stride=(stride, 1, 1))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _Norm(inputs, 3), _Conv(inputs, outputs, (3, 3, 3))
        self.norm2, self.conv2 = _Norm(outputs, 3), _Conv(outputs, outputs, (3, 3, 3))
        self.conv_shortcut = (
            _Conv(inputs, outputs, (1, 1, 1)) if inputs != outputs else nn.Identity()
        )
        with torch.no_grad():
            self.conv2.weight *= 0.3

    def forward(self, x: Clip) -> Clip:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _Norm(channels, 2)
        self.to_qkv, self.proj = (
            _FrameConv(channels, 3 * channels, 1),
            _FrameConv(channels, channels, 1),
        )

    def forward(self, x: Clip) -> Clip:
        qkv = self.to_qkv(self.norm(x)).permute(0, 2, 3, 4, 1).flatten(2, 3)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, -1))
        y = y.unflatten(2, x.shape[3:]).permute(0, 4, 1, 2, 3)
        return x + self.proj(y)


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Residual(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([_Attention(channels)])

    def forward(self, x: Clip) -> Clip:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class _Down(nn.Module):
    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": _FrameConv(channels, channels, 3)})
        self.time_conv = _TimeConv(channels, channels) if temporal else None

    def forward(self, x: Clip) -> Clip:
        x = self.resample["1"](F.pad(x, (0, 1, 0, 1)), stride=2)
        if self.time_conv is None or x.shape[2] == 1:
            return x
        return torch.cat([x[:, :, :1], self.time_conv(x, stride=2)], 2)


class _Up(nn.Module):
    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": _FrameConv(channels, channels // 2, 3)})
        self.time_conv = _TimeConv(channels, 2 * channels) if temporal else None

    def forward(self, x: Clip) -> Clip:
        if self.time_conv is not None and x.shape[2] > 1:
            later = self.time_conv(F.pad(x[:, :, 1:], (0, 0, 0, 0, 2, 0)))
            later = torch.stack(later.chunk(2, 1), 3).flatten(2, 3)
            x = torch.cat([x[:, :, :1], later], 2)
        x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        return self.resample["1"](x, padding=1)


class _Encoder(nn.Module):
    def __init__(self, shape: VaeShape) -> None:
        super().__init__()
        widths = [shape.base_dim * factor for factor in (1, *shape.dim_mult)]
        self.conv_in = _Conv(3, widths[0], (3, 3, 3))
        blocks: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(pairwise(widths)):
            blocks += [
                _Residual(inputs if index == 0 else outputs, outputs)
                for index in range(shape.num_res_blocks)
            ]
            if level < len(shape.temperal_downsample):
                blocks.append(_Down(outputs, temporal=shape.temperal_downsample[level]))
        self.down_blocks = nn.ModuleList(blocks)
        self.mid_block, self.norm_out = _Middle(widths[-1]), _Norm(widths[-1], 3)
        self.conv_out = _Conv(widths[-1], 2 * shape.z_dim, (3, 3, 3))

    def forward(self, x: Clip) -> Clip:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x))))


class _Level(nn.Module):
    def __init__(self, inputs: int, outputs: int, blocks: int, up: nn.Module | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            _Residual(inputs if index == 0 else outputs, outputs) for index in range(blocks)
        )
        self.upsamplers = nn.ModuleList([] if up is None else [up])

    def forward(self, x: Clip) -> Clip:
        for block in (*self.resnets, *self.upsamplers):
            x = block(x)
        return x


class _Decoder(nn.Module):
    def __init__(self, shape: VaeShape) -> None:
        super().__init__()
        widths = [shape.base_dim * factor for factor in shape.dim_mult[::-1]]
        channels = widths[0]
        self.conv_in, self.mid_block = _Conv(shape.z_dim, channels, (3, 3, 3)), _Middle(channels)
        levels = []
        for width, temporal in zip(widths, (*shape.temperal_downsample[::-1], None), strict=True):
            up = None if temporal is None else _Up(width, temporal=temporal)
            levels.append(_Level(channels, width, shape.num_res_blocks + 1, up))
            channels = width // 2
        self.up_blocks = nn.ModuleList(levels)
        self.norm_out, self.conv_out = _Norm(widths[-1], 3), _Conv(widths[-1], 3, (3, 3, 3))

    def forward(self, x: Clip) -> Clip:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VaeTwin(nn.Module):
    """Encoder and decoder of clips of 1 + 4n pixel frames."""

    def __init__(self, shape: VaeShape) -> None:
        super().__init__()
        self.z_dim = shape.z_dim
        self.encoder, self.decoder = _Encoder(shape), _Decoder(shape)
        self.quant_conv = _Conv(2 * shape.z_dim, 2 * shape.z_dim, (1, 1, 1))
        self.post_quant_conv = _Conv(shape.z_dim, shape.z_dim, (1, 1, 1))

    def encode(self, pixels: Clip) -> Clip:
        """The means of the latents (not normalised) of pixels in [-1, 1]."""
        return self.quant_conv(self.encoder(pixels))[:, : self.z_dim]

    def decode(self, latents: Clip) -> Clip:
        """Return the pixels of latents, not clamped to [-1, 1]."""
        return self.decoder(self.post_quant_conv(latents))


def pixels_of(frames: Sequence[object]) -> Clip:
    """uint8 clips ``[time, height, width, 3]`` as one batch of pixels in [-1, 1]."""
    batch = torch.stack([torch.as_tensor(clip) for clip in frames])
    return batch.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
