"""Encoder and decoder of the Wan VAE: pixel frames become one latent frame, and the way back."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from vllm_omni.diffusion.models.lingbot_world.vae.columns import Columns
from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS, VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import CausalConv3d
from vllm_omni.diffusion.models.lingbot_world.vae.layers import (
    ChannelNorm,
    Downsampler,
    MiddleBlock,
    ResidualBlock,
    Upsampler,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import CoderHistory, CoderRun


class Encoder(nn.Module):
    """The causal encoder. ``down_blocks`` is one flat list, as in the checkpoint's names."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        dims = config.encoder_dims
        self.conv_in = CausalConv3d(COLOURS, dims[0])
        self.down_blocks = nn.ModuleList()
        for level, (in_dim, out_dim) in enumerate(pairwise(dims)):
            self.down_blocks.append(ResidualBlock(in_dim, out_dim))
            self.down_blocks.extend(
                ResidualBlock(out_dim, out_dim) for _ in range(config.num_res_blocks - 1)
            )
            if level < len(config.temperal_downsample):
                temporal = config.temperal_downsample[level]
                self.down_blocks.append(Downsampler(out_dim, temporal=temporal))
        self.mid_block = MiddleBlock(dims[-1])
        self.norm_out = ChannelNorm(dims[-1], axes=3)
        self.conv_out = CausalConv3d(dims[-1], 2 * config.z_dim)

    def forward(
        self,
        pixels: Float[Tensor, "pixel_frames height width 3"],
        history: CoderHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "1 latent_height latent_width moments"], CoderHistory]:
        """Encode one latent frame: one pixel frame if it is the session's first, else four."""
        run = CoderRun(history)
        x = run.layer(self.conv_in, pixels, columns)
        for block in self.down_blocks:
            if isinstance(block, Downsampler):
                x = run.layer(block, x, columns)
            else:
                x = block(x, run, columns)
        x = self.mid_block(x, run, columns)
        x = run.layer(self.conv_out, x, columns, self.norm_out.activate)
        return x, run.history()


class UpLevel(nn.Module):
    """The residual blocks of one resolution, then the way to the next finer one.

    Args:
        temporal: whether the upsampler doubles time too; ``None`` for no upsampler.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, blocks: int, temporal: bool | None
    ) -> None:
        super().__init__()
        dims = (in_channels, *(out_channels,) * blocks)
        self.resnets = nn.ModuleList(
            ResidualBlock(in_dim, out_dim) for in_dim, out_dim in pairwise(dims)
        )
        self.upsamplers = nn.ModuleList(
            [] if temporal is None else [Upsampler(out_channels, temporal=temporal)]
        )

    def forward(
        self, x: Float[Tensor, "time height width in_channels"], run: CoderRun, columns: Columns
    ) -> Float[Tensor, "out_time out_height out_width out_channels"]:
        """Run the blocks, then upsample."""
        for block in self.resnets:
            x = block(x, run, columns)
        for upsampler in self.upsamplers:
            x = run.layer(upsampler, x, columns)
        return x


class Decoder(nn.Module):
    """The causal decoder: latents become pixels, from the coarsest level to the finest."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        dims = config.decoder_dims
        self.conv_in = CausalConv3d(config.z_dim, dims[0])
        self.mid_block = MiddleBlock(dims[0])
        # Each upsampler halves the channels, so later levels begin with half of the last.
        in_dims = (dims[0], *(dim // 2 for dim in dims[1:-1]))
        temporal = (*config.temperal_downsample[::-1], None)
        self.up_blocks = nn.ModuleList(
            UpLevel(in_dim, out_dim, blocks=config.num_res_blocks + 1, temporal=doubles)
            for in_dim, out_dim, doubles in zip(in_dims, dims[1:], temporal, strict=True)
        )
        self.norm_out = ChannelNorm(dims[-1], axes=3)
        self.conv_out = CausalConv3d(dims[-1], COLOURS)

    def forward(
        self,
        latents: Float[Tensor, "1 latent_height latent_width z"],
        history: CoderHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "pixel_frames height width 3"], CoderHistory]:
        """Decode one latent frame: one pixel frame if it is the session's first, else four."""
        run = CoderRun(history)
        x = run.layer(self.conv_in, latents, columns)
        x = self.mid_block(x, run, columns)
        for block in self.up_blocks:
            x = block(x, run, columns)
        x = run.layer(self.conv_out, x, columns, self.norm_out.activate)
        return x, run.history()
