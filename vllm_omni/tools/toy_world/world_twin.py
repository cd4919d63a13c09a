"""A trainable, batched twin of the product's transformer: same tensor names, same arithmetic.

The product writes keys and values into pages and handles one chunk of one session at a time. Here a
sample is a row of *blocks* of one chunk each. Clean blocks are what the commit pass computes
(timestep 0) and are what later blocks see; noisy blocks are what one denoising step computes. Which
clean blocks a block sees is the product's window of sink and ring, written down for training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.layers.rope import timestep_sinusoid
from vllm_omni.diffusion.models.lingbot_world.camera import (
    build_rays,
    fold_camera,
    reference_intrinsics,
)
from vllm_omni.diffusion.utils.scenes import INTRINSICS


@dataclass(frozen=True, slots=True)
class WorldShape:
    """The fields of ``transformer/config.json`` that shape the network and its window."""

    num_attention_heads: int = 4
    attention_head_dim: int = 32
    in_channels: int = 36
    out_channels: int = 16
    text_dim: int = 64
    freq_dim: int = 64
    ffn_dim: int = 512
    num_layers: int = 4
    sink_size: int = 3
    sliding_window_num_frames: int = 9

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def ring_chunks(self) -> int:
        """Chunks between the sink and the present one that are seen."""
        return (self.sliding_window_num_frames - self.sink_size) // LATENT_FRAMES_PER_CHUNK - 1


Pairs = list[tuple[Tensor, Tensor]]
"""For each layer two tensors ``[batch, blocks, ...]``: keys and values, or gain and shift."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known of each slot (a chunk's place in a row) before any pixel."""

    camera: Pairs
    text: Pairs
    text_bias: Float[Tensor, "batch slots rows"]
    rope: Tensor

    def at(self, slots: Sequence[int]) -> "Scene":
        """The scene of blocks that stand at these slots."""
        where = list(slots)

        def pick(pairs: Pairs) -> Pairs:
            return [(a[:, where], b[:, where]) for a, b in pairs]

        return replace(
            self,
            camera=pick(self.camera),
            text=pick(self.text),
            text_bias=self.text_bias[:, where],
            rope=self.rope[:, where],
        )


def window(slot: int, clean: Sequence[int], ring_chunks: int) -> tuple[int, ...]:
    """Indices into ``clean`` (slots, the sink being 0) that a block at ``slot`` sees."""
    return tuple(
        index
        for index, other in enumerate(clean)
        if other < slot and (other == 0 or slot - other <= ring_chunks)
    )


def patchify(x: Float[Tensor, "*lead c f h w"]) -> Float[Tensor, "*lead tokens features"]:
    """Tokens by frame, row, column; features by channel, row, column of a 2x2 patch."""
    *lead, channels, frames, height, width = x.shape
    x = x.reshape(-1, channels, frames, height // 2, 2, width // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return x.reshape(*lead, frames * height * width // 4, channels * 4)


def rope(starts: Int64[Tensor, "*n"], grid: tuple[int, int], head_dim: int) -> Tensor:
    """Unit complex numbers ``[*n, tokens, 1, head_dim / 2]`` of chunks from these latent frames."""
    spatial = 2 * (head_dim // 6)
    axes = (head_dim - 2 * spatial, spatial, spatial)
    temporal, rows, columns = (
        10000.0 ** -(torch.arange(0, axis, 2, dtype=torch.float64, device=starts.device) / axis)
        for axis in axes
    )
    place = starts.device
    frame = (starts[..., None] + torch.arange(LATENT_FRAMES_PER_CHUNK, device=place)).double()[
        ..., None, None, None
    ] * temporal
    row = torch.arange(grid[0], device=place).double()[:, None, None] * rows
    column = torch.arange(grid[1], device=place).double()[:, None] * columns
    shape = (*starts.shape, LATENT_FRAMES_PER_CHUNK, *grid, -1)
    angles = torch.cat([part.expand(shape) for part in (frame, row, column)], -1)
    angles = angles.flatten(-4, -2)[..., None, :]
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn neighbouring features, as pairs, by the unit complex numbers of :func:`rope`."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(-2)


def ray_basis(height: int, width: int) -> Float[Tensor, "kinds patches 12 1536"]:
    """Folded rays that each of a delta's twelve numbers contributes, for both kinds of camera.

    The first kind is a recorded path, the second are keys or a live camera.
    """
    kinds = []
    for row in (INTRINSICS, reference_intrinsics(width=width, height=height).tolist()):
        still = build_rays(torch.eye(4)[None], torch.tensor([row]), height=height, width=width)
        basis = torch.zeros(12, 6, height, width)
        for i in range(3):
            basis[3 * i : 3 * i + 3, 3 + i] = still[0, 3:]
            basis[9 + i, i] = 1
        folded = patchify(fold_camera(basis).transpose(0, 1)[:, :, None])
        kinds.append(folded.transpose(0, 1))
    return torch.stack(kinds)


def _fused(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Several linears of one input as one."""
    weight = torch.cat([layer.weight for layer in layers])
    return F.linear(x, weight, torch.cat([layer.bias for layer in layers])).chunk(len(layers), -1)


class _RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-6)


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = _RmsNorm(dim), _RmsNorm(dim)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.norm_k(self.k(x))), self.split(self.v(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of ``[..., tokens, heads, head_dim]``; ``bias`` is added to the scores of each key."""
        q, k, v = (t.transpose(-3, -2) for t in (q * q.shape[-1] ** -0.5, k, v))
        scores = q @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias[..., None, None, :].to(scores.dtype)
        return self.o((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))


class _Block(nn.Module):
    def __init__(self, shape: WorldShape) -> None:
        super().__init__()
        dim = shape.dim
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))
        self.self_attn = _Attention(dim, shape.num_attention_heads)
        self.cross_attn = _Attention(dim, shape.num_attention_heads)
        self.norm3 = nn.LayerNorm(dim, 1e-6)
        self.ffn = nn.Sequential(
            nn.Linear(dim, shape.ffn_dim), nn.GELU("tanh"), nn.Linear(shape.ffn_dim, dim)
        )
        self.cam_injector_layer1, self.cam_injector_layer2 = (nn.Linear(dim, dim) for _ in range(2))
        self.cam_scale_layer, self.cam_shift_layer = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def camera(self, motion: Tensor) -> tuple[Tensor, Tensor]:
        hidden = motion + self.cam_injector_layer2(F.silu(self.cam_injector_layer1(motion)))
        gain, move = _fused(hidden, self.cam_scale_layer, self.cam_shift_layer)
        return 1 + gain, move

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        scene: Scene,
        layer: int,
        sees: Sequence[tuple[int, ...]],
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            (self.modulation + modulation).unsqueeze(-2).unbind(-3)
        )
        attn, size = self.self_attn, x.shape[-1:]
        n = torch.addcmul(shift1, F.layer_norm(x, size, eps=1e-6), 1 + scale1)
        q, k, v = _fused(n, attn.q, attn.k, attn.v)
        q = rotate(attn.split(attn.norm_q(q)), scene.rope).to(v.dtype)
        k = rotate(attn.split(attn.norm_k(k)), scene.rope).to(v.dtype)
        own = (k, attn.split(v))
        seen = own if past is None else past
        made, order = [], []
        for count in sorted({len(s) for s in sees}):
            same = [i for i, s in enumerate(sees) if len(s) == count]
            members = torch.tensor(same, device=x.device)
            flat = torch.tensor([j for i in same for j in sees[i]], device=x.device).long()
            # index_select, whose gradient is many times faster than that of an index.
            k, v = (
                torch.cat(
                    [
                        a.index_select(1, flat).unflatten(1, (len(members), -1)).flatten(2, 3),
                        b.index_select(1, members),
                    ],
                    2,
                )
                if count
                else b.index_select(1, members)
                for a, b in zip(seen, own, strict=True)
            )
            made.append(attn.attend(q.index_select(1, members), k, v).float())
            order.append(members)
        attended = torch.cat(made, 1).index_select(1, torch.cat(order).argsort())
        x = torch.addcmul(x, attended, gate1)
        gain, move = scene.camera[layer]
        x = torch.addcmul(move.float(), gain.float(), x)
        cross = self.cross_attn
        q = cross.split(cross.norm_q(cross.q(self.norm3(x))))
        k, v = scene.text[layer]
        x = x + cross.attend(q.to(v.dtype), k.to(v.dtype), v, scene.text_bias).float()
        n = torch.addcmul(shift2, F.layer_norm(x, size, eps=1e-6), 1 + scale2)
        return torch.addcmul(x, self.ffn(n).float(), gate2), own


class _Head(nn.Module):
    def __init__(self, dim: int, features: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.zeros(1, 2, dim))
        self.head = nn.Linear(dim, features)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time.unsqueeze(-2)).unsqueeze(-2).unbind(-3)
        return self.head(torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale))


class WorldTwin(nn.Module):
    """The transformer of one picture size.

    Args:
        shape: of the network.
        height: of the picture, as ``width``.
    """

    def __init__(self, shape: WorldShape, *, height: int = 64, width: int = 96) -> None:
        super().__init__()
        self.shape, dim = shape, shape.dim
        self.grid = (height // 16, width // 16)
        self.patch_embedding = nn.Conv3d(shape.in_channels, dim, (1, 2, 2), (1, 2, 2))
        self.patch_embedding_wancamctrl = nn.Linear(6 * 64 * 4, dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
        self.text_embedding = _mlp(shape.text_dim, dim, nn.GELU("tanh"))
        self.time_embedding = _mlp(shape.freq_dim, dim, nn.SiLU())
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.head = _Head(dim, 4 * shape.out_channels)
        self.rays: Tensor
        with torch.device("cpu"), torch.no_grad():
            self.register_buffer("rays", ray_basis(height, width), persistent=False)
            if not self.patch_embedding.weight.is_meta:  # of shapes alone there may be any
                self._begin()

    @property
    def layers(self) -> list[_Block]:
        """The blocks of the transformer with their own type."""
        return [cast(_Block, block) for block in self.blocks]

    def scene(
        self,
        deltas: Float[Tensor, "batch slots frames 12"],
        kind: Int64[Tensor, "batch"],
        prompts: tuple[Tensor, Tensor, Tensor],
        starts: Int64[Tensor, "batch slots"],
    ) -> Scene:
        """What the model knows of each slot.

        Args:
            deltas: camera motion of each latent frame.
            kind: first index of :func:`ray_basis`.
            prompts: embedded rows ``[prompts, rows, text_dim]``, log of how often each row counts
                ``[prompts, rows]``, and which prompt each slot has ``[batch, slots]``.
            starts: first latent frame of each slot in its session.
        """
        linear = self.patch_embedding_wancamctrl
        # A token's rays are linear in the twelve numbers of its delta: embed the twelve once.
        basis = F.linear(self.rays, linear.weight).float()[kind]
        motion = torch.einsum("bsfk,bpkd->bsfpd", deltas, basis).flatten(2, 3) + linear.bias
        hidden = F.silu(self.c2ws_hidden_states_layer1(motion))
        motion = motion + self.c2ws_hidden_states_layer2(hidden)
        rows, counts, which = prompts
        used, where = torch.unique(which, return_inverse=True)
        text = self.text_embedding(rows[used])
        pairs = [block.cross_attn.key_value(text) for block in self.layers]
        return Scene(
            [block.camera(motion) for block in self.layers],
            [(k[where], v[where]) for k, v in pairs],
            counts[which],
            rope(starts, self.grid, self.shape.attention_head_dim),
        )

    def forward(
        self,
        x: Float[Tensor, "batch blocks 36 3 h w"],
        timesteps: Float[Tensor, "batch blocks"],
        scene: Scene,
        sees: Sequence[tuple[int, ...]],
        past: Pairs | None = None,
    ) -> tuple[Float[Tensor, "batch blocks 16 3 h w"], Pairs]:
        """Flow of each block, and each layer's keys and values.

        Args:
            x: latents and condition.
            timesteps: 0 for clean blocks.
            scene: of the blocks' slots.
            sees: for each block the indices of the blocks that it sees besides itself: of those of
                ``past``, or without it of these.
            past: keys and values of an earlier call.
        """
        weight = self.patch_embedding.weight.flatten(1)
        tokens = F.linear(patchify(x), weight, self.patch_embedding.bias).float()
        waves = timestep_sinusoid(timesteps.flatten(), self.shape.freq_dim)
        time = self.time_embedding(waves.float().unflatten(0, timesteps.shape)).float()
        modulation = self.time_projection(time).float().unflatten(-1, (6, -1))
        made: Pairs = []
        for layer, block in enumerate(self.layers):
            before = None if past is None else past[layer]
            tokens, own = block(tokens, modulation, scene, layer, sees, before)
            made.append(own)
        out = self.head(tokens, time).float().unflatten(-1, (2, 2, -1))  # row, column, channel
        out = out.unflatten(2, (LATENT_FRAMES_PER_CHUNK, *self.grid)).permute(
            0, 1, 7, 2, 3, 5, 4, 6
        )
        return out.flatten(6, 7).flatten(4, 5), made

    def _begin(self) -> None:
        """Fresh weights that already do what would take a short training long to find.

        The flow is noise minus picture, so a part of the residual stream begins as a copy of the
        noisy patch, and the head reads it back. A few constant features keep the norm of a token
        steady, so that the layer norms let the copy through at one scale. Gates begin open and
        attention begins local. Camera features begin as sums over a patch, at a size that one key
        step moves by about one.
        """
        factors = {
            "cam_scale_layer.weight": 0.1, "attn.o.weight": 0.5, "ffn.2.weight": 0.5,
            "time_projection.1.weight": 0.1, "time_projection.1.bias": 0.0, "head.head.weight": 0.1,
            "head.head.bias": 0.0, "patch_embedding.bias": 0.0,
        }  # fmt: skip
        for name, parameter in self.named_parameters():
            if name.endswith(("self_attn.q.bias", "self_attn.k.bias")):
                parameter.fill_(0.7)
            if name.startswith("blocks.") and name.endswith(".modulation"):
                parameter[:, [2, 5]] = 1.0
            for suffix, factor in factors.items():
                if name.endswith(suffix):
                    parameter *= factor
        channels = self.shape.out_channels
        copied = 4 * channels
        weight, head = self.patch_embedding.weight, self.head.head.weight
        weight[:copied] *= 0.1
        weight[copied:, :channels] *= 0.3
        for index in range(copied):
            channel, row, column = index // 4, index // 2 % 2, index % 2
            weight[index, channel, 0, row, column] += 1.0
            head[(2 * row + column) * channels + channel, index] += 1.0
        dict(self.named_parameters())["patch_embedding.bias"][-4:] = torch.tensor([7.0, -7, 7, -7])
        camera = self.patch_embedding_wancamctrl.weight
        rough = torch.randn(self.shape.dim, 6) * torch.tensor([1.0, 1, 1, 9, 9, 1]) / 256
        camera.copy_(rough.repeat_interleave(256, 1) + 0.1 * camera)


def _mlp(inputs: int, dim: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, dim), activation, nn.Linear(dim, dim))
