"""Encoder of the Wan VAE: the pixel frames of one latent frame become its moments."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS, VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import WHOLE_FRAME, CausalConv3d
from vllm_omni.diffusion.models.lingbot_world.vae.layers import (
    ChannelNorm,
    Downsampler,
    MiddleBlock,
    ResidualBlock,
    run_residuals,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import CoderHistory, LevelHistory


class Encoder(nn.Module):
    """Causal encoder. ``down_blocks`` is one flat list, as in the checkpoint's names."""

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
        """History of a session that has not begun."""
        return CoderHistory.fresh(self.residuals_per_level, self.num_levels)

    def forward(
        self, pixels: Float[Tensor, "pixel_frames height width 3"], history: CoderHistory
    ) -> tuple[Float[Tensor, "1 latent_height latent_width moments"], CoderHistory]:
        """Encode one latent frame: one pixel frame if it is the session's first, else four."""
        x, conv_in = self.conv_in(pixels, history.conv_in, WHOLE_FRAME)
        levels: list[LevelHistory] = []
        for level, level_history in enumerate(history.levels):
            x, kept = self._level(level, x, level_history)
            levels.append(kept)
        x, middle = self.mid_block(x, history.middle, WHOLE_FRAME)
        x = F.silu(self.norm_out(x), inplace=True)
        x, conv_out = self.conv_out(x, history.conv_out, WHOLE_FRAME)
        return x, CoderHistory(middle, tuple(levels), conv_in, conv_out)

    def _level(
        self, level: int, x: Float[Tensor, "time height width in_channels"], history: LevelHistory
    ) -> tuple[Float[Tensor, "out_time out_height out_width out_channels"], LevelHistory]:
        first = level * (self.residuals_per_level + 1)
        after = first + self.residuals_per_level
        x, residuals = run_residuals(self.down_blocks[first:after], x, history, WHOLE_FRAME)
        if after == len(self.down_blocks):
            return x, LevelHistory(residuals)
        x, kept = self.down_blocks[after](x, history.resampler)
        return x, LevelHistory(residuals, kept)
