"""The transformer written out plainly in float64, with every committed key and value kept.

An independent oracle: convolution instead of folded patches, complex numbers instead of rotated
pairs, a dense softmax over frames picked by the rule of visibility instead of a ring of pages.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

Committed = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of one layer by latent frame, ``[tokens, heads, head_dim]`` each."""


def visible_history(start: int, *, frames: int, sink: int, window: int) -> list[int]:
    """Committed frames that a chunk at ``start`` sees: the sink, then the latest that still fit."""
    chunk = range(start, start + frames)
    sinks = sum(frame < sink for frame in [*range(start), *chunk])
    rolling = sum(frame >= sink for frame in chunk)
    room = window - sinks - rolling
    older = [frame for frame in range(start) if frame >= sink]
    return [*range(min(sink, start)), *older[max(0, len(older) - room) :]]


class DenseOracle:
    """One rollout. ``forward`` with ``commit=True`` keeps what it computed."""

    def __init__(
        self, weights: dict[str, Tensor], *, heads: int, sink: int, window: int, eps: float = 1e-6
    ) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.heads, self.sink, self.window, self.eps = heads, sink, window, eps
        self.dim = weights["patch_embedding.bias"].shape[0]
        blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        self.committed: list[Committed] = [{} for _ in blocks]

    def forward(
        self,
        latents: Tensor,
        timestep: float | tuple[float, ...],
        camera: Tensor,
        text: Tensor,
        *,
        start: int,
        commit: bool = False,
    ) -> Tensor:
        """Flow of the chunk that begins at latent frame ``start``.

        Args:
            timestep: of all frames, or of each.
        """
        x = self._patches(latents, "patch_embedding")
        frames, rows, columns, _ = x.shape
        cam = self._patches(camera, "patch_embedding_wancamctrl")
        hidden = F.silu(self._linear("c2ws_hidden_states_layer1", cam))
        cam = (cam + self._linear("c2ws_hidden_states_layer2", hidden)).flatten(0, 2)
        e, modulation = self._time(timestep, rows * columns)
        prompt = self._mlp("text_embedding", text.double())
        rotation = self._rotation(start, frames, rows, columns)
        x = x.flatten(0, 2)
        for layer in range(len(self.committed)):
            name = f"blocks.{layer}"
            parts = (self.weights[f"{name}.modulation"] + modulation).unbind(1)
            shift, scale, gate = parts[:3]
            normed = self._norm(x) * (1 + scale) + shift
            x = x + gate * self._self(layer, normed, rotation, start=start, commit=commit)
            c = cam + self._linear(
                f"{name}.cam_injector_layer2",
                F.silu(self._linear(f"{name}.cam_injector_layer1", cam)),
            )
            x = x * (1 + self._linear(f"{name}.cam_scale_layer", c))
            x = x + self._linear(f"{name}.cam_shift_layer", c)
            affine = self.weights[f"{name}.norm3.weight"], self.weights[f"{name}.norm3.bias"]
            x = x + self._cross(layer, self._norm(x) * affine[0] + affine[1], prompt)
            shift, scale, gate = parts[3:]
            x = x + gate * self._mlp(f"{name}.ffn", self._norm(x) * (1 + scale) + shift)
        shift, scale = (self.weights["head.modulation"] + e[:, None]).unbind(1)
        out = self._linear("head.head", self._norm(x) * (1 + scale) + shift)
        patches = out.reshape(frames, rows, columns, 2, 2, -1)
        return torch.einsum("frcabo->ofracb", patches).reshape(-1, frames, 2 * rows, 2 * columns)

    def _patches(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"].reshape(self.dim, x.shape[0], 2, 2)
        convolved = F.conv2d(x.double().transpose(0, 1), weight, self.weights[f"{name}.bias"], 2)
        return convolved.permute(0, 2, 3, 1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        hidden = self._linear(f"{name}.0", x)
        return self._linear(f"{name}.2", F.gelu(hidden, approximate="tanh"))

    def _norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _time(self, timestep: float | tuple[float, ...], tokens: int) -> tuple[Tensor, Tensor]:
        """Rows of the head and of the blocks: one for all tokens, or one for each of them."""
        half = self.weights["time_embedding.0.weight"].shape[1] // 2
        rounded = torch.tensor(timestep, dtype=torch.float32).double().reshape(-1, 1)
        angles = rounded * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        sinusoid = torch.cat([angles.cos(), angles.sin()], dim=1)
        if len(sinusoid) > 1:
            sinusoid = sinusoid.repeat_interleave(tokens, dim=0)
        e = self._linear("time_embedding.2", F.silu(self._linear("time_embedding.0", sinusoid)))
        return e, self._linear("time_projection.1", F.silu(e)).unflatten(1, (6, self.dim))

    def _rotation(self, start: int, frames: int, rows: int, columns: int) -> Tensor:
        head_dim = self.dim // self.heads
        side = 2 * (head_dim // 6)
        grid = torch.meshgrid(
            torch.arange(start, start + frames), torch.arange(rows), torch.arange(columns),
            indexing="ij",
        )  # fmt: skip
        angles = [
            positions.double().flatten()[:, None]
            / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            for positions, dim in zip(grid, (head_dim - 2 * side, side, side), strict=True)
        ]
        return torch.exp(1j * torch.cat(angles, dim=1))[:, None, :]

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name]

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), self.heads, -1)

    def _self(self, layer: int, x: Tensor, rotation: Tensor, *, start: int, commit: bool) -> Tensor:
        name, frames = f"blocks.{layer}.self_attn", 3
        projected = (
            self._rms(f"{name}.norm_{part}.weight", self._linear(f"{name}.{part}", x))
            for part in "qk"
        )
        query, key = (_rotate(self._heads(part), rotation) for part in projected)
        value = self._heads(self._linear(f"{name}.v", x))
        kept = self.committed[layer]
        own = dict(enumerate(zip(key.chunk(frames), value.chunk(frames), strict=True), start))
        history = visible_history(start, frames=frames, sink=self.sink, window=self.window)
        seen = [kept[frame] for frame in history] + list(own.values())
        keys, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
        if commit:
            kept.update(own)
        return self._linear(f"{name}.o", _attend(query, keys, values).flatten(1))

    def _cross(self, layer: int, x: Tensor, prompt: Tensor) -> Tensor:
        name = f"blocks.{layer}.cross_attn"
        query = self._heads(self._rms(f"{name}.norm_q.weight", self._linear(f"{name}.q", x)))
        key = self._heads(self._rms(f"{name}.norm_k.weight", self._linear(f"{name}.k", prompt)))
        value = self._heads(self._linear(f"{name}.v", prompt))
        return self._linear(f"{name}.o", _attend(query, key, value).flatten(1))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(
        -2
    )


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
