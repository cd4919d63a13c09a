"""One transformer block, the camera modulation inside it, and the output head.

Shapes: tokens = latent frames x tokens per frame on this rank, in that order; ``rows`` is one
when all frames of a call have the same timestep, else one per frame.
"""

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
    CrossAttention,
    LayerParts,
    LayerWindow,
    SelfAttention,
    TextKV,
)
from vllm_omni.diffusion.models.lingbot_world.lease import LayerLeases, LeaseInputs

_MODULATION_PARTS = 6


@dataclass(frozen=True, slots=True)
class TimeEmbedding:
    """One timestep, embedded.

    Attributes:
        head: input of the head's modulation.
        blocks: input of the blocks' modulation.
    """

    head: Float[Tensor, "rows dim"]
    blocks: Float[Tensor, "rows 6 dim"]


@dataclass(frozen=True, slots=True)
class CameraModulation:
    """Gain (one plus scale) and shift of each token by the camera, in one layer."""

    gain: Float[Tensor, "tokens dim"]
    shift: Float[Tensor, "tokens dim"]


def modulate(
    x: Float[Tensor, "tokens dim"],
    scale: Float32[Tensor, "rows dim"],
    shift: Float32[Tensor, "rows dim"],
    eps: float,
) -> Float[Tensor, "tokens dim"]:
    """``LN(x) (1 + scale) + shift`` in float32, one row of scale and shift per frame.

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
    """``x + update * gate``, summed in float32 and rounded once."""
    frames = update.unflatten(0, (gate.shape[0], -1))
    return (frames * gate.unsqueeze(1)).flatten(0, 1).add_(x).to(x.dtype)


class LingBotWorldBlock(nn.Module):
    """Self-attention, camera modulation, cross-attention, feed-forward."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, dtype, group = parts.config, parts.dtype, parts.tensor_parallel
        dim, linear = config.dim, parts.linear
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.empty(1, _MODULATION_PARTS, dim, dtype=dtype))
        self.self_attn = SelfAttention(parts)
        self.cross_attn = CrossAttention(parts)
        self.norm3 = AffineLayerNorm(dim, config.eps, dtype)
        ffn = parts.feed_forward or linear
        self.ffn = nn.Sequential(
            ColumnParallelLinear(dim, config.ffn_dim, dtype, ffn, group=group),
            nn.GELU(approximate="tanh"),
            RowParallelLinear(config.ffn_dim, dim, dtype, ffn, group=group),
        )
        self.cam_injector_layer1 = ColumnParallelLinear(dim, dim, dtype, linear, group=group)
        self.cam_injector_layer2 = RowParallelLinear(dim, dim, dtype, linear, group=group)
        self.cam_scale_layer = ReplicatedLinear(dim, dim, dtype, linear)
        self.cam_shift_layer = ReplicatedLinear(dim, dim, dtype, linear)

    def camera_modulation(self, camera: Float[Tensor, "tokens dim"]) -> CameraModulation:
        """Gain and shift of this layer; they depend on the camera only, so once per chunk."""
        hidden = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(camera))) + camera
        return CameraModulation(1 + self.cam_scale_layer(hidden), self.cam_shift_layer(hidden))

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        time: TimeEmbedding,
        camera: CameraModulation,
        *,
        text: TextKV,
        window: LayerWindow,
        leases: LayerLeases | None = None,
    ) -> Float[Tensor, "tokens dim"]:
        """Run the block. Mutates the window's pages.

        Args:
            leases: replays what follows the attention as a graph; same bytes.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = self._modulation(time)
        modulated = modulate(x, scale1, shift1, self.eps)
        if leases is None:
            projected = self.self_attn(modulated, window)
            x, normalised = self.after_projection(projected, x, gate1, camera.gain, camera.shift)
            x = x + self.cross_attn(normalised, text)
        else:
            with leases.acquire(LeaseInputs(x, gate1, camera.gain, camera.shift)) as lease:
                self.self_attn.attend_into(lease, modulated, window)
                borrowed = lease.finish()
                x = borrowed.residual + self.cross_attn(borrowed.normalised, text)
        return add_gated(x, self.ffn(modulate(x, scale2, shift2, self.eps)), gate2)

    def after_projection(
        self,
        projected: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        gain: Float[Tensor, "tokens dim"],
        shift: Float[Tensor, "tokens dim"],
    ) -> tuple[Float[Tensor, "tokens dim"], Float[Tensor, "tokens dim"]]:
        """Residual stream after gate and camera, and the input of the cross-attention."""
        x = add_gated(x, projected, gate)
        x = gain * x + shift
        return x, self.norm3(x)

    def post_attention(
        self,
        attended: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        gain: Float[Tensor, "tokens dim"],
        shift: Float[Tensor, "tokens dim"],
    ) -> tuple[Tensor, ...]:
        """Projection, residual stream and cross-attention input: the part that is captured."""
        projected = self.self_attn.o(attended)
        return projected, *self.after_projection(projected, x, gate, gain, shift)

    def write_only(
        self, x: Float[Tensor, "tokens dim"], time: TimeEmbedding, window: LayerWindow
    ) -> None:
        """Store this layer's keys and values; the end of a commit. Mutates the pages."""
        shift, scale = self._modulation(time)[:2]
        self.self_attn.write_only(modulate(x, scale, shift, self.eps), window)

    def _modulation(self, time: TimeEmbedding) -> tuple[Float32[Tensor, "rows dim"], ...]:
        return (self.modulation + time.blocks.float()).unbind(dim=1)


class Head(nn.Module):
    """Modulated norm and projection to the patch of each token."""

    def __init__(self, parts: LayerParts, out_features: int) -> None:
        super().__init__()
        dim, dtype = parts.config.dim, parts.dtype
        self.eps = parts.config.eps
        self.modulation = nn.Parameter(torch.empty(1, 2, dim, dtype=dtype))
        self.head = ReplicatedLinear(dim, out_features, dtype, parts.linear)

    def forward(
        self, x: Float[Tensor, "tokens dim"], time: TimeEmbedding
    ) -> Float[Tensor, "tokens features"]:
        """Project this rank's tokens."""
        shift, scale = (self.modulation + time.head.float().unsqueeze(1)).unbind(dim=1)
        return self.head(modulate(x, scale, shift, self.eps))
