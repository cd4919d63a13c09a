"""The Wan VAE: streaming encode and decode with state that the caller owns.

Weights are those of the checkpoint's ``vae/diffusion_pytorch_model.safetensors``, by name and
shape. Every call works through its frames one latent frame at a time, so the result does not
depend on how a rollout is cut into calls: chunk plans agree bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, TEMPORAL_FACTOR
from vllm_omni.diffusion.models.lingbot_world.vae.coders import Decoder, Encoder
from vllm_omni.diffusion.models.lingbot_world.vae.columns import WHOLE_FRAME, Columns
from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS, VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import (
    ConvPath,
    PointwiseConv,
    Preparable,
)
from vllm_omni.diffusion.models.lingbot_world.vae.layers import ChannelNorm, NormSilu
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState


@dataclass(frozen=True, slots=True)
class LatentStatistics:
    """Mean and standard deviation of each latent channel, on the device that uses them."""

    mean: Float[Tensor, " z"]
    std: Float[Tensor, " z"]

    @classmethod
    def of(cls, config: VaeConfig, dtype: torch.dtype, device: torch.device) -> "LatentStatistics":
        """Read the statistics of a checkpoint and put them on a device."""
        return cls(
            mean=torch.tensor(config.latents_mean, dtype=dtype, device=device),
            std=torch.tensor(config.latents_std, dtype=dtype, device=device),
        )


class WanVAE(nn.Module):
    """The encoder and the decoder, with the statistics of their latents.

    Build it, load the weights, move it to its device and dtype, then call :meth:`prepare` once.
    Gradients are neither needed nor supported: call under ``torch.inference_mode``.

    Args:
        conv_path: ``stacked``, ``conv3d``, or ``auto`` for the faster of the two on the device.
    """

    def __init__(self, config: VaeConfig, *, conv_path: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.conv_path = conv_path
        self.encoder = Encoder(config)
        self.quant_conv = PointwiseConv(2 * config.z_dim, 2 * config.z_dim, axes=3)
        self.post_quant_conv = PointwiseConv(config.z_dim, config.z_dim, axes=3)
        self.decoder = Decoder(config)
        self._encoded: LatentStatistics
        self._decoded: LatentStatistics

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.quant_conv.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device that weights and activations are on."""
        return self.quant_conv.weight.device

    def prepare(self) -> None:
        """Arrange the weights for the convolution path, without a second copy of them.

        Needed once, after loading and after every later change of device, dtype or storage.
        """
        path = ConvPath.choose(self.conv_path, self.device)
        self._encoded = LatentStatistics.of(self.config, self.dtype, self.device)
        self._decoded = LatentStatistics.of(self.config, torch.float32, self.device)
        # Parameters cannot become views of tensors made in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            for module in self.modules():
                if isinstance(module, Preparable):
                    module.prepare(path)

    def fuse_norms(self, kernel: NormSilu | None) -> None:
        """Let each norm before a SiLU run as one kernel with it; ``None`` for separate calls."""
        for norm in self._norms():
            norm.fused = kernel

    def norm_widths(self) -> set[int]:
        """Return the numbers of channels that are normalised."""
        return {norm.gamma.numel() for norm in self._norms()}

    def encode(
        self,
        pixels: Float[Tensor, "3 pixel_frames height width"],
        state: EncoderState,
        columns: Columns = WHOLE_FRAME,
    ) -> tuple[Float[Tensor, "z latent_frames latent_height latent_width"], EncoderState]:
        """Return the normalised posterior mean of the next pixel frames of a session.

        Args:
            pixels: in [-1, 1], sides multiples of 8. A session's first call takes 1 + 4k
                frames, a later one 4k.
            columns: which columns of the frame to encode here; the others' latents are gathered.

        Raises:
            ValueError: for another number of frames or another size.
        """
        moments, state = self.encode_moments(pixels, state, columns)
        latents = self._encoded
        normalised = (moments[..., : self.config.z_dim] - latents.mean) / latents.std
        return normalised.permute(3, 0, 1, 2).contiguous(), state

    def encode_moments(
        self,
        pixels: Float[Tensor, "3 pixel_frames height width"],
        state: EncoderState,
        columns: Columns = WHOLE_FRAME,
    ) -> tuple[Float[Tensor, "latent_frames latent_height latent_width moments"], EncoderState]:
        """Encode as :meth:`encode` does, but return posterior means, then log-variances."""
        spans = list(_latent_frame_spans(pixels.shape[1], started=state.latent_frames > 0))
        _check_sides(pixels.shape[2], pixels.shape[3])
        history = state.history
        moments: list[Tensor] = []
        for first, after in spans:
            span = pixels[:, first:after].to(self.dtype).permute(1, 2, 3, 0).contiguous()
            frame, history = self.encoder(columns.own(span), history, columns)
            moments.append(self.quant_conv(frame))
        return columns.gather(torch.cat(moments)), EncoderState(
            state.latent_frames + len(spans), history
        )

    def decode(
        self,
        latents: Float32[Tensor, "z latent_frames latent_height latent_width"],
        state: DecoderState,
        columns: Columns = WHOLE_FRAME,
    ) -> tuple[Float[Tensor, "3 pixel_frames height width"], DecoderState]:
        """Return the pixels, in [-1, 1], of the next latent frames of a session.

        Args:
            latents: model space. The first of a session makes one pixel frame, others four.
            columns: which columns of the frame to decode; all by default.

        Returns:
            Pixels in the VAE's dtype, laid out ``[pixel_frames, height, width, 3]`` in memory,
            and the new state.
        """
        scaled = latents.permute(1, 2, 3, 0) * self._decoded.std + self._decoded.mean
        scaled = columns.own(scaled.to(self.dtype).contiguous())
        latent_frames, latent_height, latent_width, _ = scaled.shape
        missing = TEMPORAL_FACTOR - 1 if state.latent_frames == 0 else 0
        pixels = scaled.new_empty(
            TEMPORAL_FACTOR * latent_frames - missing,
            SPATIAL_FACTOR * latent_height,
            SPATIAL_FACTOR * latent_width,
            COLOURS,
        )
        history = state.history
        done = 0
        for frame in scaled.split(1):
            decoded, history = self.decoder(self.post_quant_conv(frame), history, columns)
            torch.clamp(decoded, -1.0, 1.0, out=pixels[done : done + len(decoded)])
            done += len(decoded)
        return pixels.permute(3, 0, 1, 2), DecoderState(
            state.latent_frames + latent_frames, history
        )

    def _norms(self) -> Iterator[ChannelNorm]:
        return (module for module in self.modules() if isinstance(module, ChannelNorm))


def _latent_frame_spans(pixel_frames: int, *, started: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges of pixel frames that make one latent frame each."""
    lead = 0 if started else 1
    if pixel_frames < 1 or (pixel_frames - lead) % TEMPORAL_FACTOR:
        needed = f"{TEMPORAL_FACTOR}k" if started else f"1 + {TEMPORAL_FACTOR}k"
        raise ValueError(f"encode takes {needed} pixel frames here, got {pixel_frames}")
    if lead:
        yield 0, 1
    for first in range(lead, pixel_frames, TEMPORAL_FACTOR):
        yield first, first + TEMPORAL_FACTOR


def _check_sides(height: int, width: int) -> None:
    if height % SPATIAL_FACTOR or width % SPATIAL_FACTOR:
        raise ValueError(
            f"sides of a frame must be multiples of {SPATIAL_FACTOR} pixels, got {width}x{height}"
        )


_FRAMES, _ROWS, _COLUMNS = 2, 3, 5
_KERNEL_FILE = "vllm_omni.diffusion.models.lingbot_world.vae.norm_silu"


def fuse_norms(vae: WanVAE) -> bool:
    """Let each norm before a SiLU be one kernel with it. Only a GPU has such a kernel.

    Needs Triton. The kernel is compiled here for all sizes of frames, never within a chunk.

    Returns:
        False if the kernel is wrong on this GPU. Nothing is changed then.
    """
    if vae.device.type != "cuda":
        return True
    kernel = import_module(_KERNEL_FILE).norm_silu
    right = all(kernel_is_right(kernel, n, vae.dtype, vae.device) for n in vae.norm_widths())
    if right:
        vae.fuse_norms(kernel)
    return right


def kernel_is_right(
    kernel: NormSilu, channels: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Tell whether a kernel computes a small random case as separate calls do.

    A sum in another order may round the norm one step of ``eps |v|`` further. The slope of SiLU is
    at most 1.1, and rounding its own result adds half a step on both sides.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_FRAMES, _ROWS, _COLUMNS, channels)
    x = torch.randn(shape, generator=generator).to(dtype)
    scale = torch.randn(channels, generator=generator)
    normed = F.normalize(x.float(), dim=-1) * scale
    wanted = F.silu(normed.to(dtype).float())
    # Borders show whether the kernel writes its own columns alone.
    frames = torch.zeros(_FRAMES, _ROWS, _COLUMNS + 2, channels, dtype=dtype, device=device)
    kernel(x.to(device), scale.to(device), frames[:, :, 1:-1])
    error = (frames.cpu().float() - F.pad(wanted, (0, 0, 1, 1))).abs()
    allowed = 2.2 * torch.finfo(dtype).eps * float(normed.abs().max())
    return float(error.max()) <= allowed and not frames[:, :, [0, -1]].any()
