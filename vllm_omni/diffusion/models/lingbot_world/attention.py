"""Self-attention over the KV window and cross-attention to the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.diffusion.distributed.comm import Arriving, UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.layers.linear import (
    ColumnParallelLinear,
    LinearMethod,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm_omni.diffusion.layers.norm import RMSNormAcrossHeads
from vllm_omni.diffusion.layers.rope import BROADCAST, RotaryMethod, RotaryTables
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import (
    ar_diffusion_paged_attention,
    write_window,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import LayerPages, WindowPlan


@dataclass(frozen=True, slots=True)
class TextKV:
    """Keys and values of the prompt in one layer, for the heads of this rank."""

    key: Float[Tensor, "text_tokens heads head_dim"]
    value: Float[Tensor, "text_tokens heads head_dim"]


# Not frozen: of frozen ones torch 2.11 compiles for the types of all fields, other plans anew.
@dataclass(slots=True)
class LayerWindow:
    """The KV window of one layer during one chunk: pages and the chunk's place in them."""

    pages: LayerPages
    plan: WindowPlan
    rotary: RotaryTables


@dataclass(frozen=True, slots=True)
class CameraModulation:
    """Gain (one plus scale) and shift of each token by the camera, in one layer."""

    gain: Float[Tensor, "tokens dim"]
    shift: Float[Tensor, "tokens dim"]


class Modulation(NamedTuple):
    """How the timestep changes one half of a block: its input (shift, scale) and output (gate)."""

    shift: Float32[Tensor, "rows dim"]
    scale: Float32[Tensor, "rows dim"]
    gate: Float32[Tensor, "rows dim"]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What one layer gets during one chunk, beside the tokens and the timestep."""

    camera: CameraModulation
    text: TextKV
    window: LayerWindow


def attend_window(
    query: Float[Tensor, "local_tokens heads head_dim"],
    sent: Arriving,
    window: LayerWindow,
    parts: LayerParts,
) -> Float[Tensor, "local_tokens heads head_dim"]:
    """Exchange tokens for heads, store keys and values, attend, exchange back.

    Mutates the window's pages.
    """
    attended = attend_heads(query, sent, window, parts)
    return parts.exchange.heads_to_tokens(attended, latent_frames=LATENT_FRAMES_PER_CHUNK)


def attend_heads(
    query: Float[Tensor, "local_tokens heads head_dim"],
    sent: Arriving,
    window: LayerWindow,
    parts: LayerParts,
) -> Float[Tensor, "tokens local_heads head_dim"]:
    """Attend as :func:`attend_window` does, but leave out the exchange back to tokens."""
    queries = parts.exchange.tokens_to_heads(query, latent_frames=LATENT_FRAMES_PER_CHUNK)
    key, value = sent.wait()
    write_window(key, value, window.pages, window.plan)
    return ar_diffusion_paged_attention(
        queries.wait()[0].flatten(0, -3),
        pages=window.pages,
        plan=window.plan,
        backend=parts.backend,
        scale=parts.scale,
    )


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What every layer is built with and shares with the others.

    Attributes:
        linear: how weights are stored and multiplied.
        backend: how attention is computed.
        attention_kernel: name of the kernel that the backend runs, for the operator.
        tensor_parallel: ranks that share the weights.
        exchange: exchanges between the ranks that share the tokens.
        feed_forward: how the weights of the feed-forward part are; ``None`` for like all others.
        product_with_gelu: computes the first feed-forward linear and the GELU behind it together;
            ``None`` for one after the other.
        rotary: how queries and keys are turned.
        send: how keys and values are sent, or a wrapper that a compiler does not look into.
        attend: :func:`attend_window`, or such a wrapper.
    """

    config: LingBotWorldConfig
    dtype: torch.dtype
    linear: LinearMethod
    backend: AttentionBackend
    tensor_parallel: RankGroup
    exchange: UlyssesExchange
    feed_forward: LinearMethod | None = None
    product_with_gelu: LinearMethod | None = None
    rotary: RotaryMethod = BROADCAST
    send: Callable[..., Arriving] = UlyssesExchange.tokens_to_heads
    attend: Callable[..., Tensor] = attend_window
    attention_kernel: str = "unknown"

    @property
    def scale(self) -> float:
        """Factor of the attention scores, ``1 / sqrt(head_dim)``."""
        return self.config.attention_head_dim**-0.5

    def around_the_compiler(self) -> LayerParts:
        """Make the compiler leave exchanges and the attention to the window alone."""
        disable = torch.compiler.disable
        return replace(self, send=disable(self.send), attend=disable(self.attend))

    def heads(self, x: Float[Tensor, "tokens local_dim"]) -> Float[Tensor, "tokens heads head_dim"]:
        """View the features of each token as those of one head after another."""
        return x.unflatten(-1, (-1, self.config.attention_head_dim))

    def qk_norm(self) -> RMSNormAcrossHeads:
        """Make a norm for the queries or the keys of one attention."""
        config = self.config
        return RMSNormAcrossHeads(
            config.dim, config.eps, self.dtype, tensor_parallel=self.tensor_parallel
        )


class SelfAttention(nn.Module):
    """Attention of a chunk's tokens to each other and to the committed frames."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, group = parts.config, parts.tensor_parallel
        self.parts = parts
        self.qkv = QKVParallelLinear(config.dim, parts.dtype, parts.linear, group=group)
        self.o = RowParallelLinear(config.dim, config.dim, parts.dtype, parts.linear, group=group)
        self.norm_q = parts.qk_norm()
        self.norm_k = parts.qk_norm()

    @property
    def local_heads(self) -> int:
        """Number of heads that the weights of this rank make."""
        return self.qkv.local_dim // self.parts.config.attention_head_dim

    def forward(
        self, x: Float[Tensor, "tokens dim"], window: LayerWindow
    ) -> Float[Tensor, "tokens dim"]:
        """Attend to the window and to the chunk itself. Mutates the window's pages."""
        attended = self.parts.attend(*self.queries_keys_values(x, window), window, self.parts)
        return self.o(attended.flatten(1))

    def queries_keys_values(
        self, x: Float[Tensor, "tokens dim"], window: LayerWindow
    ) -> tuple[Float[Tensor, "tokens heads head_dim"], Arriving]:
        """Make queries, keys and values: normalised, cut into heads, rotated by position.

        Among several ranks, keys and values are on their way while the queries are made.
        """
        if self.parts.exchange.group.size > 1:
            sent, rest = self._send(x, window)
            return self._rotated(self.norm_q(self.qkv.forward_q(rest)), window), sent
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        key = self._rotated(self.norm_k(key), window)
        return self._rotated(self.norm_q(query), window), Arriving((key, self.parts.heads(value)))

    def write_only(self, x: Float[Tensor, "tokens dim"], window: LayerWindow) -> None:
        """Store keys and values without attending. Mutates the window's pages."""
        key, value = self._send(x, window)[0].wait()
        write_window(key, value, window.pages, window.plan)

    def _send(
        self, x: Float[Tensor, "tokens dim"], window: LayerWindow
    ) -> tuple[Arriving, Float[Tensor, "tokens rest"]]:
        """Send keys and values, and return what the queries are made of."""
        made, rest = self.qkv.forward_kv(x)
        key, value = made.chunk(2, dim=-1)
        key = self._rotated(self.norm_k(key), window)
        sent = self.parts.send(
            self.parts.exchange, key, self.parts.heads(value), latent_frames=LATENT_FRAMES_PER_CHUNK
        )
        return sent, rest

    def _rotated(
        self, x: Float[Tensor, "tokens local_dim"], window: LayerWindow
    ) -> Float[Tensor, "tokens heads head_dim"]:
        return self.parts.rotary.rotate(self.parts.heads(x), window.rotary)


class CrossAttention(nn.Module):
    """Attention of a chunk's tokens to all rows of the prompt, padding included."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, group = parts.config, parts.tensor_parallel
        self.parts = parts
        self.q, self.k, self.v = (
            ColumnParallelLinear(config.dim, config.dim, parts.dtype, parts.linear, group=group)
            for _ in range(3)
        )
        self.o = RowParallelLinear(config.dim, config.dim, parts.dtype, parts.linear, group=group)
        self.norm_q = parts.qk_norm()
        self.norm_k = parts.qk_norm()

    def text_kv(self, text: Float[Tensor, "text_tokens dim"]) -> TextKV:
        """Compute keys and values of an embedded prompt; once per prompt is enough."""
        key, value = self.norm_k(self.k(text)), self.v(text)
        return TextKV(key=self.parts.heads(key), value=self.parts.heads(value))

    def forward(self, x: Float[Tensor, "tokens dim"], text: TextKV) -> Float[Tensor, "tokens dim"]:
        """Attend to the prompt; every token stays on its rank."""
        query = self.parts.heads(self.norm_q(self.q(x)))
        attended = self.parts.backend.attend(query, text.key, text.value, scale=self.parts.scale)
        return self.o(attended.flatten(1))
