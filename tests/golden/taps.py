"""Records intermediate activations of a transformer by hooks on its modules."""

import torch
from torch import nn

from tests.helpers.kv_window import resident_frames
from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, PATCH
from vllm_omni.diffusion.layers.norm import layer_norm
from vllm_omni.diffusion.layers.rope import RotaryTables
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import SessionKV

_OUTER = {
    "patch_embedding": "patch_embedding.conv",
    "patch_embedding_wancamctrl": "patch_embedding_wancamctrl",
    "c2ws_hidden_states_layer1": "c2ws_layer1",
    "c2ws_hidden_states_layer2": "c2ws_layer2",
    "time_embedding": "time_embedding",
    "time_projection": "time_projection",
    "text_embedding": "text_embedding",
    "head": "head",
}
_INNER = {
    "self_attn": "self_attn",
    "cam_injector_layer2": "cam_injector",
    "cam_scale_layer": "cam_scale",
    "cam_shift_layer": "cam_shift",
    "norm3": "norm3",
    "cross_attn": "cross_attn",
    "ffn": "ffn",
}


class RecordingAttention(AttentionBackend):
    """A backend that keeps the arguments and the result of every call until cleared."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Attend and remember."""
        out = self.inner.attend(query, key, value, scale=scale)
        self.calls.append((query.clone(), key.clone(), value.clone(), out.clone()))
        return out

    def kernel(self, *operands: torch.Tensor, scale: float) -> str:
        """Name the kernel of the inner backend."""
        return self.inner.kernel(*operands, scale=scale)

    def attend_pages(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        *,
        block_table: torch.Tensor,
        visible_tokens: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend and remember the visible tokens, in the order of the block table."""
        out = self.inner.attend_pages(
            query,
            key_pages,
            value_pages,
            block_table=block_table,
            visible_tokens=visible_tokens,
            scale=scale,
        )
        seen = (
            pages[block_table].flatten(0, 1)[:visible_tokens] for pages in (key_pages, value_pages)
        )
        self.calls.append((query.clone(), *seen, out.clone()))
        return out


class Taps:
    """Last input and output of each module of interest, and what follows from them."""

    def __init__(
        self, transformer: CausalLingBotWorldTransformer3DModel, attention: RecordingAttention
    ) -> None:
        self.transformer = transformer
        self.attention = attention
        self._seen: dict[str, torch.Tensor] = {}
        for module, name in _OUTER.items():
            self._watch(transformer.get_submodule(module), name)
        for index, block in enumerate(transformer.blocks):
            for module, name in _INNER.items():
                self._watch(block.get_submodule(module), f"block{index}.{name}")
            self._watch(block, f"block{index}.out")

    def clear_calls(self) -> None:
        """Forget attention calls; done before each forward."""
        self.attention.calls.clear()

    def snapshot(
        self, flow: torch.Tensor, kv: SessionKV, rotary: RotaryTables, start: int
    ) -> dict[str, torch.Tensor]:
        """All taps of the forward that has just run, by the names of the golden arrays."""
        taps = {name: value for name, value in self._seen.items() if not name.endswith(".in")}
        rows, columns = (side // PATCH for side in flow.shape[-2:])
        patches = taps["patch_embedding.conv"].unflatten(1, (rows, columns))
        taps["patch_embedding.conv"] = patches.permute(3, 0, 1, 2)
        for name in ("time_embedding", "time_projection"):  # one row for all frames of the call
            taps[name] = taps[name].expand(LATENT_FRAMES_PER_CHUNK, -1)
        order = _chronological_tokens(kv, start)
        for index, block in enumerate(self.transformer.blocks):
            taps.update(
                self._block(f"block{index}", block.eps, self.attention.calls[2 * index], order)
            )
        return taps | {"rope.cos": rotary.cos, "rope.sin": rotary.sin, "out": flow, "flow": flow}

    def _block(
        self, block: str, eps: float, attended: tuple[torch.Tensor, ...], order: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        query, key, value, out = attended
        before_ffn = self._seen[f"{block}.norm3.in"] + self._seen[f"{block}.cross_attn"]
        return {
            f"{block}.norm1": layer_norm(self._seen[f"{block}.out.in"], eps),
            f"{block}.self_attn_in": self._seen[f"{block}.self_attn.in"],
            f"{block}.attn_q_rope": query,
            f"{block}.attn_k_visible": key[order],
            f"{block}.attn_v_visible": value[order],
            f"{block}.attn_out": out,
            f"{block}.norm2": layer_norm(before_ffn, eps),
            f"{block}.ffn_in": self._seen[f"{block}.ffn.in"],
        }

    def _watch(self, module: nn.Module, name: str) -> None:
        def remember(_: nn.Module, arguments: tuple, output: object) -> None:
            self._seen[f"{name}.in"] = arguments[0].clone()
            if isinstance(output, torch.Tensor):
                self._seen[name] = output.clone()

        module.register_forward_hook(remember)


def _chronological_tokens(kv: SessionKV, start: int) -> torch.Tensor:
    """Order of the visible tokens of the chunk at ``start``, oldest frame first."""
    slots = torch.tensor(resident_frames(kv.layout, start + LATENT_FRAMES_PER_CHUNK))
    size = kv.tokens_per_frame
    return (slots[:, None] * size + torch.arange(size)).flatten()
