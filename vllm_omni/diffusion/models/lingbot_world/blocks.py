"""One transformer block, the camera modulation inside it, and the output head.

Shapes: tokens = latent frames x tokens per frame on this rank, in that order; ``rows`` is one
when all frames of a call have the same timestep, else one per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor, nn

from vllm_omni.diffusion.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_omni.diffusion.layers.norm import AffineLayerNorm, layer_norm
from vllm_omni.diffusion.models.lingbot_world.attention import (
    CameraModulation,
    CrossAttention,
    LayerContext,
    LayerParts,
    LayerWindow,
    Modulation,
    SelfAttention,
)

_BLOCK_ROWS = 6
_HEAD_ROWS = 2


@dataclass(frozen=True, slots=True)
class TimeEmbedding:
    """A timestep in the form that blocks and head take.

    Attributes:
        head: input of the head's modulation.
        blocks: input of the blocks' modulation.
    """

    head: Float[Tensor, "rows dim"]
    blocks: Float[Tensor, "rows 6 dim"]


def modulate(
    x: Float[Tensor, "tokens dim"],
    scale: Float32[Tensor, "rows dim"],
    shift: Float32[Tensor, "rows dim"],
    eps: float,
) -> Float[Tensor, "tokens dim"]:
    """Compute ``LN(x) (1 + scale) + shift`` in float32, one row of scale and shift per frame.

    They are weight and bias of the norm, which applies them in the same pass.
    """
    frames = x.unflatten(0, (scale.shape[0], -1))
    rows = zip(frames, 1 + scale, shift, strict=True)
    normed = [layer_norm(frame, eps, weight, bias) for frame, weight, bias in rows]
    return (normed[0] if len(normed) == 1 else torch.cat(normed)).to(x.dtype)


def add_gated(
    x: Float[Tensor, "tokens dim"],
    update: Float[Tensor, "tokens dim"],
    gate: Float32[Tensor, "rows dim"],
) -> Float[Tensor, "tokens dim"]:
    """Compute ``x + update * gate`` in float32 and round the sum once."""
    frames = update.unflatten(0, (gate.shape[0], -1))
    return (frames * gate.unsqueeze(1)).flatten(0, 1).add_(x).to(x.dtype)


class PostAttention:
    """How a block goes on from its self-attention to its end: it calls its modules in turn.

    Whatever overrides this computes the same bytes. The end is part of it because a compiler fuses
    what follows the attention up to the end of the function that attends, and no further.
    """

    def prepare(self, blocks: Sequence[LingBotWorldBlock]) -> None:
        """Make ready for these blocks, once their weights have been loaded.

        Raises:
            ConfigError: if that cannot be done.
        """

    def begin_session(self, tokens: int) -> None:
        """Make ready for a session of this many tokens per chunk on this rank.

        Raises:
            WorkerFailedError: if an earlier failure has left the device unusable.
        """

    def run(
        self,
        block: LingBotWorldBlock,
        modulated: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        feed_forward: Modulation,
        layer: LayerContext,
    ) -> Float[Tensor, "tokens dim"]:
        """Attend to the window, follow the camera, attend to the prompt, feed forward.

        Mutates the pages of the window.

        Args:
            modulated: input of the self-attention.
            x: residual stream before it.
            gate: of the self-attention's output.
            feed_forward: of the part that comes last.

        Returns:
            The residual stream after the block.
        """
        projected = block.self_attn(modulated, layer.window)
        x, normalised = block.after_projection(projected, x, gate, layer.camera)
        return block.feed_forward(x + block.cross_attn(normalised, layer.text), feed_forward)


EAGER = PostAttention()
"""It has no state."""


class LingBotWorldBlock(nn.Module):
    """One layer: self-attention, camera modulation, cross-attention, feed-forward.

    Args:
        post_attention: shared by all layers.
    """

    def __init__(self, parts: LayerParts, post_attention: PostAttention = EAGER) -> None:
        super().__init__()
        config, dtype, group = parts.config, parts.dtype, parts.tensor_parallel
        dim, linear = config.dim, parts.linear
        self.eps = config.eps
        self.post_attention = post_attention
        self.modulation = nn.Parameter(torch.empty(1, _BLOCK_ROWS, dim, dtype=dtype))
        self.self_attn = SelfAttention(parts)
        self.cross_attn = CrossAttention(parts)
        self.norm3 = AffineLayerNorm(dim, config.eps, dtype)
        ffn, with_gelu = parts.feed_forward or linear, parts.product_with_gelu
        self.ffn = nn.Sequential(
            ColumnParallelLinear(dim, config.ffn_dim, dtype, with_gelu or ffn, group=group),
            nn.Identity() if with_gelu else nn.GELU(approximate="tanh"),
            RowParallelLinear(config.ffn_dim, dim, dtype, ffn, group=group),
        )
        self.cam_injector_layer1 = ColumnParallelLinear(dim, dim, dtype, linear, group=group)
        self.cam_injector_layer2 = RowParallelLinear(dim, dim, dtype, linear, group=group)
        self.cam_scale_layer = ReplicatedLinear(dim, dim, dtype, linear)
        self.cam_shift_layer = ReplicatedLinear(dim, dim, dtype, linear)

    def camera_modulation(self, camera: Float[Tensor, "tokens dim"]) -> CameraModulation:
        """Compute gain and shift of this layer. Only the camera decides them: once per chunk."""
        hidden = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(camera))) + camera
        return CameraModulation(1 + self.cam_scale_layer(hidden), self.cam_shift_layer(hidden))

    def forward(
        self, x: Float[Tensor, "tokens dim"], time: TimeEmbedding, layer: LayerContext
    ) -> Float[Tensor, "tokens dim"]:
        """Run the block. Mutates the window's pages."""
        attention, feed_forward = self._modulations(time)
        modulated = modulate(x, attention.scale, attention.shift, self.eps)
        return self.post_attention.run(self, modulated, x, attention.gate, feed_forward, layer)

    def feed_forward(
        self, x: Float[Tensor, "tokens dim"], modulation: Modulation
    ) -> Float[Tensor, "tokens dim"]:
        """Return the residual stream after the feed-forward part, the last of the block."""
        modulated = modulate(x, modulation.scale, modulation.shift, self.eps)
        return add_gated(x, self.ffn(modulated), modulation.gate)

    def after_projection(
        self,
        projected: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        camera: CameraModulation,
    ) -> tuple[Float[Tensor, "tokens dim"], Float[Tensor, "tokens dim"]]:
        """Return the residual stream after gate and camera, and the input of cross-attention."""
        x = add_gated(x, projected, gate)
        x = camera.gain * x + camera.shift
        return x, self.norm3(x)

    def write_only(
        self, x: Float[Tensor, "tokens dim"], time: TimeEmbedding, window: LayerWindow
    ) -> None:
        """Store keys and values and stop, as the last layer of a commit. Mutates the pages."""
        attention, _ = self._modulations(time)
        modulated = modulate(x, attention.scale, attention.shift, self.eps)
        self.self_attn.write_only(modulated, window)

    def _modulations(self, time: TimeEmbedding) -> tuple[Modulation, Modulation]:
        """Return the modulations of the attention and of the feed-forward part."""
        rows = (self.modulation + time.blocks.float()).unbind(dim=1)
        return Modulation(*rows[:3]), Modulation(*rows[3:])


class Head(nn.Module):
    """The output layer: a modulated norm and a projection to the patch of each token."""

    def __init__(self, parts: LayerParts, out_features: int) -> None:
        super().__init__()
        dim, dtype = parts.config.dim, parts.dtype
        self.eps = parts.config.eps
        self.modulation = nn.Parameter(torch.empty(1, _HEAD_ROWS, dim, dtype=dtype))
        self.head = ReplicatedLinear(dim, out_features, dtype, parts.linear)

    def forward(
        self, x: Float[Tensor, "tokens dim"], time: TimeEmbedding
    ) -> Float[Tensor, "tokens features"]:
        """Project the tokens of this rank to patches of latents."""
        shift, scale = (self.modulation + time.head.float().unsqueeze(1)).unbind(dim=1)
        return self.head(modulate(x, scale, shift, self.eps))
