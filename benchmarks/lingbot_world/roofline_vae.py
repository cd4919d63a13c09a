"""FLOPs and bytes of the video autoencoder, chunk by chunk, counted from its geometry."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.lingbot_world.roofline_counts import HISTORY_FRAMES, SPATIAL_FACTOR

CAUSAL_TAPS = 27
"""Taps of a 3x3x3 convolution; those are the ones with a history."""


@dataclass(frozen=True, slots=True)
class Vae:
    """Sizes of the autoencoder; the defaults are the released one's."""

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    res_blocks: int = 2
    temporal: tuple[bool, ...] = (False, True, True)
    """Which of the encoder's downsamplings also halve time; the decoder mirrors them."""


@dataclass(frozen=True, slots=True)
class Conv:
    """One convolution on one chunk.

    Attributes:
        taps: kernel positions in space and time.
        frames: output frames in this chunk.
        pixels: output rows times columns.
        history_frames: input frames kept for the next chunk.
        history_pixels: rows times columns of the kept input.
    """

    channels_in: int
    channels_out: int
    taps: int
    frames: int
    pixels: int
    history_frames: int = 0
    history_pixels: int = 0

    @property
    def flops(self) -> int:
        """Multiply-adds times two."""
        return 2 * self.channels_in * self.channels_out * self.taps * self.frames * self.pixels

    @property
    def output_elements(self) -> int:
        """Elements it writes."""
        return self.channels_out * self.frames * self.pixels

    @property
    def history_elements(self) -> int:
        """Elements it remembers between chunks."""
        return self.channels_in * self.history_frames * self.history_pixels


@dataclass(frozen=True, slots=True)
class VaeCount:
    """One direction of the autoencoder on one chunk."""

    flops: int
    output_elements: int
    history_elements: int


def count_decode(vae: Vae, *, height: int, width: int, latent_frames: int, first: bool) -> VaeCount:
    """Decode ``latent_frames`` frames; the very first of a session makes one pixel frame."""
    pixels = (height // SPATIAL_FACTOR) * (width // SPATIAL_FACTOR)
    return _sum(vae, _decoder(vae, pixels, latent_frames, first=first), latent_frames, pixels)


def count_encode(vae: Vae, *, height: int, width: int, latent_frames: int, first: bool) -> VaeCount:
    """Encode the pixel frames of ``latent_frames`` frames: 4 each, but 1 for the very first."""
    pixel_frames = 4 * latent_frames - 3 * first
    pixels = height * width
    latent_pixels = pixels // SPATIAL_FACTOR**2
    return _sum(vae, _encoder(vae, pixels, pixel_frames, first=first), latent_frames, latent_pixels)


def _sum(vae: Vae, convs: Iterator[Conv], latent_frames: int, latent_pixels: int) -> VaeCount:
    counted = list(convs)
    top = vae.base_dim * vae.dim_mult[-1]
    # The middle block attends over each latent frame: q|k|v and output projections, then two
    # products of pixels x pixels.
    attention = 2 * top * top * 4 * latent_frames * latent_pixels
    attention += 4 * latent_frames * latent_pixels**2 * top
    return VaeCount(
        flops=attention + sum(conv.flops for conv in counted),
        output_elements=sum(conv.output_elements for conv in counted),
        history_elements=sum(conv.history_elements for conv in counted),
    )


def _causal(channels_in: int, channels_out: int, frames: int, pixels: int) -> Conv:
    return Conv(channels_in, channels_out, CAUSAL_TAPS, frames, pixels, HISTORY_FRAMES, pixels)


def _residual(channels_in: int, channels_out: int, frames: int, pixels: int) -> Iterator[Conv]:
    yield _causal(channels_in, channels_out, frames, pixels)
    yield _causal(channels_out, channels_out, frames, pixels)
    if channels_in != channels_out:
        yield Conv(channels_in, channels_out, 1, frames, pixels)


def _decoder(vae: Vae, pixels: int, frames: int, *, first: bool) -> Iterator[Conv]:
    top = vae.base_dim * vae.dim_mult[-1]
    yield Conv(vae.z_dim, vae.z_dim, 1, frames, pixels)
    yield _causal(vae.z_dim, top, frames, pixels)
    for _ in range(2):
        yield from _residual(top, top, frames, pixels)
    channels = top
    for level, multiple in enumerate(reversed(vae.dim_mult)):
        out = vae.base_dim * multiple
        for _ in range(vae.res_blocks + 1):
            yield from _residual(channels, out, frames, pixels)
            channels = out
        if level == len(vae.dim_mult) - 1:
            break
        if vae.temporal[-1 - level]:
            # The session's first frame is not doubled in time.
            doubled = frames - first
            yield Conv(out, 2 * out, 3, doubled, pixels, HISTORY_FRAMES, pixels)
            frames += doubled
        pixels *= 4
        channels = out // 2
        yield Conv(out, channels, 9, frames, pixels)
    yield _causal(vae.base_dim * vae.dim_mult[0], 3, frames, pixels)


def _encoder(vae: Vae, pixels: int, frames: int, *, first: bool) -> Iterator[Conv]:
    yield _causal(3, vae.base_dim, frames, pixels)
    channels = vae.base_dim
    for level, multiple in enumerate(vae.dim_mult):
        out = vae.base_dim * multiple
        for _ in range(vae.res_blocks):
            yield from _residual(channels, out, frames, pixels)
            channels = out
        if level == len(vae.dim_mult) - 1:
            break
        pixels //= 4
        yield Conv(out, out, 9, frames, pixels)
        if vae.temporal[level]:
            halved = (frames - first) // 2
            yield Conv(out, out, 3, halved, pixels, 1, pixels)
            frames = halved + first
    for _ in range(2):
        yield from _residual(channels, channels, frames, pixels)
    yield _causal(channels, 2 * vae.z_dim, frames, pixels)
    yield Conv(2 * vae.z_dim, 2 * vae.z_dim, 1, frames, pixels)


def parse_vae(config: dict) -> Vae:
    """Geometry from ``vae/config.json``.

    Raises:
        KeyError: a size is missing.
    """
    return Vae(
        base_dim=config["base_dim"],
        z_dim=config["z_dim"],
        dim_mult=tuple(config["dim_mult"]),
        res_blocks=config["num_res_blocks"],
        temporal=tuple(config["temperal_downsample"]),
    )


def fused_bytes(count: VaeCount, element_bytes: int) -> int:
    """Memory traffic with norms, activations and padding fused: 2.5 passes over conv outputs."""
    return math.ceil(2.5 * count.output_elements * element_bytes)


def eager_bytes(count: VaeCount, element_bytes: int) -> int:
    """Memory traffic op by op: about 20 passes over conv outputs."""
    return 20 * count.output_elements * element_bytes
