"""The transformer that a recipe names, and one session of it."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.golden.archive import Archive, RecipeError
from tests.golden.recipe import Keys
from tests.golden.taps import RecordingAttention
from tests.helpers.kv_window import chronological
from tests.helpers.model_builders import fragment, transformer_parts
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.models.checkpoint_files import read_json
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.diffusion.models.lingbot_world.load import load_transformer
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV

_CPU = torch.device("cpu")
_SCATTERED_PAGE_TOKENS = 7
"""Divides no frame, so that pages end inside frames."""
_FIELDS = frozenset(field.name for field in fields(LingBotWorldConfig))
_OTHER_NAMES = {
    "heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "layers": "num_layers",
    "sink": "sink_size",
    "sink_frames": "sink_size",
    "window": "sliding_window_num_frames",
    "window_frames": "sliding_window_num_frames",
    "local": "local_attn_size",
}
"""Short names of fields that a configuration may use."""
_FUSED = re.compile(r"(.*self_attn)\.(?:to_)?qkv\.(weight|bias)")


@dataclass(frozen=True)
class Model:
    """A transformer: its sizes, and a checkpoint folder or the weights by checkpoint name."""

    config: LingBotWorldConfig
    checkpoint: Path | None
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, keys: Keys, archive: Archive) -> "Model":
        """The ``model`` of a recipe: a checkpoint, or weights and config; then overrides."""
        if keys.has("checkpoint"):
            checkpoint = archive.checkpoint(keys.text("checkpoint"))
            weights: Mapping[str, torch.Tensor] = {}
            raw = read_json(checkpoint / "transformer" / "config.json")
        else:
            checkpoint = None
            weights = _checkpoint_names(archive.tensors(keys.text("weights")))
            raw = archive.resolved(keys.take("config"))
        said = keys.optional("overrides") or {}
        overrides = archive.resolved(said)
        if not isinstance(raw, Mapping) or not isinstance(overrides, Mapping):
            raise RecipeError(f"{keys.where}: config and overrides must be objects or refer to one")
        keys.done()
        unknown = set(_renamed(overrides)) - _FIELDS
        if unknown and not isinstance(said, str):  # facts may say more than sizes
            raise RecipeError(f"{keys.where}: no such sizes to override: {', '.join(unknown)}")
        return cls(_config({**_renamed(raw), **_renamed(overrides)}), checkpoint, weights)

    def load(
        self, dtype: torch.dtype, attention: RecordingAttention, parallel: ParallelState
    ) -> CausalLingBotWorldTransformer3DModel:
        """The product's transformer of this rank, its weights read from a folder."""
        parts = transformer_parts(self.config, backend=attention, dtype=dtype, parallel=parallel)
        if self.checkpoint is not None:
            return load_transformer(self.checkpoint, parts, _CPU)
        with tempfile.TemporaryDirectory(prefix="golden-weights-") as scratch:
            folder = Path(scratch) / "transformer"
            folder.mkdir()
            save_file(dict(self.weights), folder / "diffusion_pytorch_model.safetensors")
            return load_transformer(Path(scratch), parts, _CPU)


class Session:
    """One window of keys and values, filled frame after frame.

    A session of the product begins at frame 0. Here it may begin anywhere: positions are those of
    the recipe, and the window counts from the first frame that the session was given.

    Args:
        scattered: pages that do not stand in a row and end inside frames.
    """

    def __init__(
        self,
        transformer: CausalLingBotWorldTransformer3DModel,
        geometry: VideoGeometry,
        text: torch.Tensor,
        *,
        scattered: bool,
    ) -> None:
        self.transformer, self.geometry = transformer, geometry
        self.text = transformer.embed_text(text.to(transformer.dtype))
        self.kv = SessionKV(_pool(transformer, geometry, len(text), scattered), self._frame_tokens)
        if scattered is self.kv.allocation.is_extent:
            raise AssertionError("the pages of the window are not laid out as they should be")
        self._origin = self._end = 0

    @property
    def _frame_tokens(self) -> int:
        return self.geometry.tokens_per_frame

    def context(self, camera: torch.Tensor, start_frame: int) -> ChunkContext:
        """What the forwards of the chunk at ``start_frame`` share."""
        if self._end == 0:
            self._origin = start_frame
        place = start_frame - self._origin
        if not 0 <= place <= self._end:
            raise RecipeError(
                f"a chunk at frame {start_frame} does not follow the {self._end} committed frames "
                f"from {self._origin} on"
            )
        context = self.transformer.context(
            camera.to(self.transformer.dtype),
            self.text,
            self.kv,
            geometry=self.geometry,
            start_latent_frame=place,
        )
        positions = self.transformer.rotary_tables(self.geometry, start_frame, _CPU)
        return replace(context, rotary=positions)

    def committed(self, start_frame: int, frames: int) -> None:
        """Note that a chunk was committed, perhaps a second time."""
        self._end = max(self._end, start_frame - self._origin + frames)

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of this rank's heads, oldest committed frame first."""
        return chronological(self.kv, layer, self._end)


def _pool(
    transformer: CausalLingBotWorldTransformer3DModel,
    geometry: VideoGeometry,
    text_tokens: int,
    scattered: bool,
) -> KVPool:
    spec = transformer.kv_cache_spec(
        text_tokens=text_tokens,
        page_tokens=_SCATTERED_PAGE_TOKENS if scattered else KVCacheConfig().page_tokens,
    )
    pages = spec.window_pages(geometry.tokens_per_frame)
    pool = KVPool(spec, 2 * pages if scattered else pages, dtype=transformer.dtype, device=_CPU)
    if scattered:
        fragment(pool)
    return pool


def _config(raw: Mapping[str, Any]) -> LingBotWorldConfig:
    known = {key: value for key, value in raw.items() if key in _FIELDS}
    if "attention_head_dim" not in known and "dim" in raw:
        known["attention_head_dim"] = raw["dim"] // raw["num_attention_heads"]
    return LingBotWorldConfig.from_dict(known)


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by their own names; a short name does not replace a value under the own one."""
    short = {_OTHER_NAMES[key]: value for key, value in raw.items() if key in _OTHER_NAMES}
    return short | {key: value for key, value in raw.items() if key not in _OTHER_NAMES}


def _checkpoint_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as in a checkpoint, for weights with fused self-attention projections too."""
    plain: dict[str, torch.Tensor] = {}
    for full, array in weights.items():
        name = full.removeprefix("transformer.")
        fused = _FUSED.fullmatch(name)
        if fused is None:
            plain[name] = array.contiguous()
            continue
        for part, rows in zip("qkv", array.chunk(3), strict=True):
            plain[f"{fused[1]}.{part}.{fused[2]}"] = rows.contiguous()
    return plain
