"""Convolutions of the Wan VAE.

Activations are ``[time, height, width, channels]``, contiguous: one sample, channels last. A
causal convolution sees its own frame and two earlier ones. Its history is a parameter and a
result; the module holds weights only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.columns import Columns

KERNEL = 3
HISTORY_FRAMES = KERNEL - 1


WriteInput = Callable[[Tensor, Tensor], object]
"""Writes what a convolution reads of new frames (first) into their place (second)."""


class ConvPath(StrEnum):
    """How a causal 3x3x3 convolution is computed. Equal up to the order of its sums."""

    CONV3D = "conv3d"
    """The library's own convolution in three dimensions."""
    STACKED = "stacked"
    """One convolution in two dimensions over three frames stacked as channels."""

    @classmethod
    def choose(cls, name: str, device: torch.device) -> "ConvPath":
        """Resolve ``auto``: torch has no fast float32 convolution in three dimensions on CPU."""
        if name == "auto":
            return cls.STACKED if device.type == "cpu" else cls.CONV3D
        return cls(name)


class Preparable(nn.Module):
    """A module that arranges its weights once, after they were loaded and moved."""

    def prepare(self, path: ConvPath, /) -> None:
        """Arrange weights for ``path``. Repeat after a change of device, dtype or storage."""
        raise NotImplementedError


@runtime_checkable
class CausalKernel(Protocol):
    """A causal convolution over frames that already have their history in front."""

    def __call__(
        self, padded: Float[Tensor, "padded_time height width in_channels"], width_padding: int, /
    ) -> Float[Tensor, "time height out_width out_channels"]:
        """Convolve; two frames fewer come out than go in."""
        ...


@dataclass(frozen=True, slots=True)
class Conv3dKernel:
    """Calls ``F.conv3d`` on the channels-last view."""

    weight: Float[Tensor, "out_channels in_channels kernel_time kernel_rows kernel_columns"]
    bias: Float[Tensor, " out_channels"]
    stride: int = 1

    def __call__(
        self, padded: Float[Tensor, "padded_time height width in_channels"], width_padding: int, /
    ) -> Float[Tensor, "time height out_width out_channels"]:
        """Convolve all output frames in one call."""
        rows = self.weight.shape[3] // 2
        output = F.conv3d(
            padded.permute(3, 0, 1, 2).unsqueeze(0),
            self.weight,
            self.bias,
            stride=(self.stride, 1, 1),
            padding=(0, rows, width_padding if rows else 0),
        )
        return output.squeeze(0).permute(1, 2, 3, 0).contiguous()


@dataclass(frozen=True, slots=True)
class StackedKernel:
    """Calls a channels-last ``F.conv2d`` per output frame over three frames stacked as channels."""

    weight: Float[Tensor, "out_channels stacked_channels 3 3"]
    bias: Float[Tensor, " out_channels"]

    def __call__(
        self, padded: Float[Tensor, "padded_time height width in_channels"], width_padding: int, /
    ) -> Float[Tensor, "time height out_width out_channels"]:
        """Convolve one output frame after another."""
        frames = padded.unbind(0)
        padding = (1, width_padding)
        outputs: list[Tensor] = []
        # Frame by frame, so that the stack stays small; its sums are those of a single call.
        for first in range(len(frames) - HISTORY_FRAMES):
            stack = torch.cat(frames[first : first + KERNEL], dim=-1)[None]
            outputs.append(_conv2d(stack, self.weight, self.bias, padding))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class StackedLinearKernel:
    """Computes a (3, 1, 1) convolution as one linear over three frames stacked as channels."""

    weight: Float[Tensor, "out_channels stacked_channels"]
    bias: Float[Tensor, " out_channels"]
    stride: int

    def __call__(
        self,
        padded: Float[Tensor, "padded_time height width in_channels"],
        _width_padding: int,
        /,
    ) -> Float[Tensor, "time height out_width out_channels"]:
        """Convolve all output frames in one product; width plays no part."""
        last = padded.shape[0] - HISTORY_FRAMES
        stacked = torch.cat([padded[k : last + k : self.stride] for k in range(KERNEL)], dim=-1)
        return F.linear(stacked, self.weight, self.bias)


def _copy(
    x: Float[Tensor, "time height width channels"],
    target: Float[Tensor, "time height width channels"],
) -> None:
    target.copy_(x)


class CausalConv3d(Preparable):
    """A 3x3x3 convolution that looks back two frames and never ahead."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, KERNEL, KERNEL, KERNEL))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self._kernel: CausalKernel | None = None

    def prepare(self, path: ConvPath, /) -> None:
        """Arrange the weight for ``path`` and choose the kernel."""
        if path is ConvPath.STACKED:
            self.weight, memory = _time_before_channels(self.weight)
            weight = memory.flatten(3).permute(0, 3, 1, 2)
            self._kernel = StackedKernel(weight, self.bias.detach())
        else:
            self.weight = _frozen(_channels_innermost(self.weight))
            self._kernel = Conv3dKernel(self.weight.detach(), self.bias.detach())

    def forward(
        self,
        x: Float[Tensor, "time height width in_channels"],
        history: Float[Tensor, "2 height width in_channels"] | None,
        columns: Columns,
        write: WriteInput = _copy,
    ) -> tuple[
        Float[Tensor, "time height width out_channels"],
        Float[Tensor, "2 height width in_channels"],
    ]:
        """Convolve new frames; ``None`` as history is two frames of zeros.

        History, new frames and borders are written side by side, each once, where they are read.

        Returns:
            The output and the last two input frames, without borders.
        """
        assert self._kernel is not None, "prepare() comes before the first call"
        time, height, width, _ = x.shape
        padded, own = columns.room(HISTORY_FRAMES + time, height, width, x)
        own[:HISTORY_FRAMES] = 0 if history is None else history
        write(x, own[HISTORY_FRAMES:])
        kept = own[-HISTORY_FRAMES:].clone()
        columns.fill_borders(padded)
        return self._kernel(padded, columns.width_padding), kept


class TemporalConv(Preparable):
    """A (3, 1, 1) convolution over frames that already have their history in front."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, KERNEL, 1, 1))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride
        self._kernel: CausalKernel | None = None

    def prepare(self, path: ConvPath, /) -> None:
        """Arrange the weight for ``path`` and choose the kernel."""
        if path is ConvPath.STACKED:
            self.weight, memory = _time_before_channels(self.weight)
            self._kernel = StackedLinearKernel(memory.flatten(1), self.bias.detach(), self.stride)
        else:
            self.weight = _frozen(_channels_innermost(self.weight))
            self._kernel = Conv3dKernel(self.weight.detach(), self.bias.detach(), self.stride)

    def forward(
        self, padded: Float[Tensor, "padded_time height width in_channels"]
    ) -> Float[Tensor, "time height width out_channels"]:
        """Convolve over time; every ``stride``-th output frame is computed."""
        assert self._kernel is not None, "prepare() comes before the first call"
        return self._kernel(padded, 0)


class PointwiseConv(nn.Module):
    """A convolution with a window of one: a linear over channels.

    Args:
        axes: axes of the window in the checkpoint's weight, two or three.
    """

    def __init__(self, in_channels: int, out_channels: int, *, axes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *(1,) * axes))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(
        self, x: Float[Tensor, "time height width in_channels"]
    ) -> Float[Tensor, "time height width out_channels"]:
        """Map the channels of each pixel by itself."""
        return F.linear(x, self.weight.flatten(1), self.bias)


class SpatialConv(Preparable):
    """A 3x3 convolution of each frame by itself."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, KERNEL, KERNEL))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def prepare(self, _path: ConvPath, /) -> None:
        """Arrange the weight; every path convolves single frames alike."""
        self.weight = _frozen(_channels_innermost(self.weight))

    def forward(
        self,
        x: Float[Tensor, "time height width in_channels"],
        padding: tuple[int, int],
        stride: int = 1,
    ) -> Float[Tensor, "time out_height out_width out_channels"]:
        """Convolve each frame, with zeros around it as ``padding`` (rows, columns) says."""
        return _conv2d(x, self.weight, self.bias, padding, stride)


def _conv2d(
    x: Float[Tensor, "time height width in_channels"],
    weight: Float[Tensor, "out_channels in_channels 3 3"],
    bias: Float[Tensor, " out_channels"],
    padding: tuple[int, int],
    stride: int = 1,
) -> Float[Tensor, "time out_height out_width out_channels"]:
    """Convolve each frame by itself, with the channels last.

    For float32 on a processor the library changes kernels at a certain input size. A slab of a
    frame must sum in the order of the whole frame, so the kernel is named there.
    """
    channels_second = x.permute(0, 3, 1, 2)
    processor = weight.device.type == "cpu" and weight.dtype == torch.float32
    if processor and torch.backends.mkldnn.is_available():
        both = (stride, stride)
        output = torch.mkldnn_convolution(channels_second, weight, bias, padding, both, (1, 1), 1)
    else:
        output = F.conv2d(channels_second, weight, bias, stride=stride, padding=padding)
    return output.permute(0, 2, 3, 1).contiguous()


def _time_before_channels(
    weight: Float[Tensor, "out_channels in_channels kernel_time kernel_rows kernel_columns"],
) -> tuple[
    nn.Parameter,
    Float[Tensor, "out_channels kernel_rows kernel_columns kernel_time in_channels"],
]:
    """Reorder a weight in memory, so that time stands before the input channels.

    Returns:
        A parameter of the old shape and the reordered tensor. Both are views of one memory: there
        is no second copy, and a later load by name still reaches the kernel.
    """
    memory = weight.detach().permute(0, 3, 4, 2, 1).contiguous()
    return _frozen(memory.permute(0, 4, 3, 1, 2)), memory


def _channels_innermost(weight: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the weight with its input channels innermost in memory.

    Ascend's convolutions read the plain layout, and torch_npu refuses any other.
    """
    if weight.device.type == "npu":
        return weight
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return weight.contiguous(memory_format=layouts[weight.dim()])


def _frozen(weight: Float[Tensor, "..."]) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)
