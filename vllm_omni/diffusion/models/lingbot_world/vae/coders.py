"""Encoder of the Wan VAE: the pixel frames of one latent frame become its moments."""

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
    run_residuals,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import CoderHistory, LevelHistory


class Encoder(nn.Module):
    """The causal encoder. ``down_blocks`` is one flat list, as in the checkpoint's names."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        dims = config.encoder_dims
        self.residuals_per_level = config.num_res_blocks
        self.num_levels = len(config.dim_mult)
        self.conv_in = CausalConv3d(COLOURS, dims[0])
        self.down_blocks = nn.ModuleList()
        for level, (in_dim, out_dim) in enumerate(pairwise(dims)):
            self.down_blocks.append(ResidualBlock(in_dim, out_dim))
            self.down_blocks.extend(
                ResidualBlock(out_dim, out_dim) for _ in range(config.num_res_blocks - 1)
            )
            if level < self.num_levels - 1:
                temporal = config.temperal_downsample[level]
                self.down_blocks.append(Downsampler(out_dim, temporal=temporal))
        self.mid_block = MiddleBlock(dims[-1])
        self.norm_out = ChannelNorm(dims[-1], axes=3)
        self.conv_out = CausalConv3d(dims[-1], 2 * config.z_dim)

    def fresh(self) -> CoderHistory:
        """Return the history of a session that has not begun."""
        return CoderHistory.fresh(self.residuals_per_level, self.num_levels)

    def forward(
        self,
        pixels: Float[Tensor, "pixel_frames height width 3"],
        history: CoderHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "1 latent_height latent_width moments"], CoderHistory]:
        """Encode one latent frame: one pixel frame if it is the session's first, else four."""
        x, conv_in = self.conv_in(pixels, history.conv_in, columns)
        levels: list[LevelHistory] = []
        for level, level_history in enumerate(history.levels):
            x, kept = self._level(level, x, level_history, columns)
            levels.append(kept)
        x, middle = self.mid_block(x, history.middle, columns)
        x, conv_out = self.conv_out(x, history.conv_out, columns, self.norm_out.activate)
        return x, CoderHistory(middle, tuple(levels), conv_in, conv_out)

    def _level(
        self,
        level: int,
        x: Float[Tensor, "time height width in_channels"],
        history: LevelHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "out_time out_height out_width out_channels"], LevelHistory]:
        first = level * (self.residuals_per_level + 1)
        after = first + self.residuals_per_level
        x, residuals = run_residuals(self.down_blocks[first:after], x, history, columns)
        if after == len(self.down_blocks):
            return x, LevelHistory(residuals)
        x, kept = self.down_blocks[after](x, history.resampler, columns)
        return x, LevelHistory(residuals, kept)


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
        self,
        x: Float[Tensor, "time height width in_channels"],
        history: LevelHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "out_time out_height out_width out_channels"], LevelHistory]:
        """Run the blocks, then upsample."""
        x, residuals = run_residuals(self.resnets, x, history, columns)
        kept = None
        for upsampler in self.upsamplers:
            x, kept = upsampler(x, history.resampler, columns)
        return x, LevelHistory(residuals, kept)


class Decoder(nn.Module):
    """The causal decoder: latents become pixels, from the coarsest level to the finest."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        dims = config.decoder_dims
        self.residuals_per_level = config.num_res_blocks + 1
        self.conv_in = CausalConv3d(config.z_dim, dims[0])
        self.mid_block = MiddleBlock(dims[0])
        # Each upsampler halves the channels, so later levels begin with half of the last.
        in_dims = (dims[0], *(dim // 2 for dim in dims[1:-1]))
        temporal = (*config.temperal_downsample[::-1], None)
        self.up_blocks = nn.ModuleList(
            UpLevel(in_dim, out_dim, blocks=self.residuals_per_level, temporal=doubles)
            for in_dim, out_dim, doubles in zip(in_dims, dims[1:], temporal, strict=True)
        )
        self.norm_out = ChannelNorm(dims[-1], axes=3)
        self.conv_out = CausalConv3d(dims[-1], COLOURS)

    def fresh(self) -> CoderHistory:
        """Return the history of a session that has not begun."""
        return CoderHistory.fresh(self.residuals_per_level, len(self.up_blocks))

    def forward(
        self,
        latents: Float[Tensor, "1 latent_height latent_width z"],
        history: CoderHistory,
        columns: Columns,
    ) -> tuple[Float[Tensor, "pixel_frames height width 3"], CoderHistory]:
        """Decode one latent frame: one pixel frame if it is the session's first, else four."""
        x, conv_in = self.conv_in(latents, history.conv_in, columns)
        x, middle = self.mid_block(x, history.middle, columns)
        levels: list[LevelHistory] = []
        for block, level_history in zip(self.up_blocks, history.levels, strict=True):
            x, kept = block(x, level_history, columns)
            levels.append(kept)
        x, conv_out = self.conv_out(x, history.conv_out, columns, self.norm_out.activate)
        return x, CoderHistory(middle, tuple(levels), conv_in, conv_out)
