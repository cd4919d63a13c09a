"""Norm, residual block, frame attention and resamplers of the Wan VAE.

Same conventions as :mod:`.convolution`: activations ``[time, height, width, channels]``,
histories in and out, weights named as in the checkpoint.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.columns import Columns
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import (
    HISTORY_FRAMES,
    CausalConv3d,
    ConvPath,
    PointwiseConv,
    Preparable,
    SpatialConv,
    TemporalConv,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import CoderRun

SMALLEST_NORM = 1e-12
UPSAMPLE = 2

NormSilu = Callable[[Tensor, Tensor, Tensor], object]
"""Writes ``silu(x / max(|x|, 1e-12) * scale)`` of frames and a scale into a third tensor."""


class ChannelNorm(Preparable):
    """Computes ``x / max(|x|, 1e-12) * sqrt(channels) * gamma`` over the channels, in float32.

    Args:
        axes: trailing axes of one in the checkpoint's ``gamma``.

    Attributes:
        fused: a kernel that :meth:`activate` runs instead of its two calls, if there is one.
    """

    def __init__(self, channels: int, *, axes: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *(1,) * axes))
        self.fused: NormSilu | None = None
        self._scale: Tensor | None = None

    def prepare(self, _path: ConvPath, /) -> None:
        """Fold the constant factor into ``gamma``."""
        gamma = self.gamma.detach().flatten().float()
        self._scale = gamma * gamma.numel() ** 0.5

    def forward(
        self, x: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Normalise; the result is new memory."""
        return self._into(x, torch.empty_like(x))

    def activate(
        self,
        x: Float[Tensor, "time height width channels"],
        target: Float[Tensor, "time height width channels"],
    ) -> None:
        """Write ``silu(norm(x))`` into ``target``, bit for bit that of two calls if not fused."""
        if self.fused is None:
            F.silu(self._into(x, target), inplace=True)
        else:
            self.fused(x, self._prepared, target)

    def _into(
        self,
        x: Float[Tensor, "time height width channels"],
        target: Float[Tensor, "time height width channels"],
    ) -> Float[Tensor, "time height width channels"]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = norm.clamp_min_(SMALLEST_NORM).reciprocal_()
        # The second product is rounded to the target's dtype as it is stored.
        return torch.mul(x * inverse, self._prepared, out=target)

    @property
    def _prepared(self) -> Float[Tensor, " channels"]:
        assert self._scale is not None, "prepare() comes before the first call"
        return self._scale


class ResidualBlock(nn.Module):
    """Two normalised causal convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(in_channels, axes=3)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = ChannelNorm(out_channels, axes=3)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = (
            nn.Identity()
            if in_channels == out_channels
            else PointwiseConv(in_channels, out_channels, axes=3)
        )

    def forward(
        self, x: Float[Tensor, "time height width in_channels"], run: CoderRun, columns: Columns
    ) -> Float[Tensor, "time height width out_channels"]:
        """Compute ``shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))`` for new frames."""
        y = run.layer(self.conv1, x, columns, self.norm1.activate)
        y = run.layer(self.conv2, y, columns, self.norm2.activate)
        return y.add_(self.conv_shortcut(x))


class FrameAttention(nn.Module):
    """Single-head self-attention over the pixels of each frame, around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, axes=2)
        self.to_qkv = PointwiseConv(channels, 3 * channels, axes=2)
        self.proj = PointwiseConv(channels, channels, axes=2)

    def forward(
        self, x: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Let every pixel attend to all pixels of its own frame."""
        # [time, pixels, 3 * channels] -> three contiguous [time, 1, pixels, channels]: strided
        # operands make the attention kernel sum in another order.
        qkv = self.to_qkv(self.norm(x)).flatten(1, 2).unsqueeze(1)
        query, key, value = (part.contiguous() for part in qkv.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.proj(attended.view(x.shape)).add_(x)


class MiddleBlock(nn.Module):
    """Residual block, frame attention, residual block, at the coarsest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResidualBlock(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(
        self, x: Float[Tensor, "time height width channels"], run: CoderRun, columns: Columns
    ) -> Float[Tensor, "time height width channels"]:
        """Run the three in turn; the attention sees the full width."""
        x = self.resnets[0](x, run, columns)
        x = columns.own(self.attentions[0](columns.gather(x)))
        return self.resnets[1](x, run, columns)


class Downsampler(nn.Module):
    """Halves rows and columns, then time if ``temporal``."""

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": SpatialConv(channels, channels)})
        self.time_conv = TemporalConv(channels, channels, stride=2) if temporal else None

    def forward(
        self,
        x: Float[Tensor, "time height width channels"],
        history: Float[Tensor, "1 half_height half_width channels"] | None,
        columns: Columns,
    ) -> tuple[
        Float[Tensor, "out_time half_height half_width channels"],
        Float[Tensor, "1 half_height half_width channels"] | None,
    ]:
        """Downsample; a session's first call passes its one frame on without halving time."""
        x = self.resample["1"](columns.right_and_below(x), padding=(0, 0), stride=2)
        if self.time_conv is None:
            return x, None
        last = x[-1:].clone()
        if history is None:
            return x, last
        return self.time_conv(torch.cat([history, x])), last


class Upsampler(nn.Module):
    """Doubles time if ``temporal``, then rows and columns; halves the channels."""

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": SpatialConv(channels, channels // 2)})
        self.time_conv = TemporalConv(channels, 2 * channels, stride=1) if temporal else None

    def forward(
        self,
        x: Float[Tensor, "time height width channels"],
        history: Float[Tensor, "2 height width channels"] | None,
        columns: Columns,
    ) -> tuple[
        Float[Tensor, "out_time double_height double_width out_channels"],
        Float[Tensor, "2 height width channels"] | None,
    ]:
        """Upsample; a session's first call passes its one frame on without doubling time."""
        kept = None
        if self.time_conv is not None and history is None:
            # The frame that passed through leaves no trace: the next call looks back on zeros.
            kept = x.new_zeros(HISTORY_FRAMES, *x.shape[1:])
        elif self.time_conv is not None and history is not None:
            padded = torch.cat([history, x])
            kept = padded[-HISTORY_FRAMES:].clone()
            # Two frames of each: the first half of its channels, then the second half.
            x = torch.stack(self.time_conv(padded).chunk(2, dim=-1), dim=1).flatten(0, 1)
        time, height, width, _ = x.shape
        padded, own = columns.room(time, UPSAMPLE * height, UPSAMPLE * width, x)
        squares = own.unflatten(2, (-1, UPSAMPLE)).unflatten(1, (-1, UPSAMPLE))
        squares.copy_(x[:, :, None, :, None])
        columns.fill_borders(padded)
        return self.resample["1"](padded, padding=(1, columns.width_padding)), kept
