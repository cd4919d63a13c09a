"""What a transformer set holds, read off its names, facts and shapes.

Names are ``[PREFIX.]chunkC.(stepS|commit).WHAT``, ``[PREFIX.]chunkC.x0``,
``[PREFIX.]kv.chunkC.layerL.(key|value)``, ``[PREFIX.]resident.layerL.(key|value)`` and the inputs
``condition``, ``camera``, ``prompt_embeds``, ``noise`` and ``weights.NAME``, with or without a
prefix. A prefix is a variant of the model; ``rankR`` anywhere in a name is one rank's part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tests.golden.archive import Archive, find_facts, first_fact
from tests.helpers.golden import GoldenSet
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig, read_json

_INPUTS = ("condition", "camera", "prompt_embeds", "noise", "weights")
_HEAD = re.compile(r"chunk\d+|kv|resident|(?:text|cross)(?:_?kv)?|" + "|".join(_INPUTS))
_RANK = re.compile(r"rank_?(\d+)")
_OUTPUT = re.compile(
    r"(?:kv|resident|(?:text|cross)(?:_?kv)?)\..*layer\d+.*"
    r"|chunk\d+\.(?:step\d+|commit)\..+"
    r"|chunk\d+\.(?:x0|.*layer\d+.*)"
)
_DEFAULT_SEED, _DEFAULT_SHIFT = 42, 5.0
_CONFIG_FIELDS = frozenset(field.name for field in fields(LingBotWorldConfig))
_ALIASES = {
    "heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "layers": "num_layers",
    "sink": "sink_size",
    "sink_frames": "sink_size",
    "window": "sliding_window_num_frames",
    "window_frames": "sliding_window_num_frames",
    "win": "sliding_window_num_frames",
    "local": "local_attn_size",
}
_NAMED_SIZES = (
    (re.compile(r"sink_?(\d+)"), "sink_size"),
    (re.compile(r"win(?:dow)?_?(\d+)"), "sliding_window_num_frames"),
    (re.compile(r"local(?:_attn(?:_size)?)?_?(\d+)"), "local_attn_size"),
)


@dataclass(frozen=True, slots=True)
class Name:
    """An array's name, taken apart.

    Attributes:
        key: the name without prefix and rank.
        rank: whose part it is, ``None`` for all of it.
    """

    full: str
    prefix: str
    key: str
    rank: int | None

    @property
    def is_output(self) -> bool:
        """Whether a transformer replay makes arrays of this name."""
        return _OUTPUT.fullmatch(self.key) is not None


def parse(full: str) -> Name:
    """Take a name apart; a name without a known head has an empty key."""
    parts, rank = [], None
    for part in full.split("."):
        if match := _RANK.fullmatch(part):
            rank = int(match[1])
        else:
            parts.append(part)
    head = next((i for i, part in enumerate(parts) if _HEAD.fullmatch(part)), len(parts))
    return Name(full, ".".join(parts[:head]), ".".join(parts[head:]), rank)


@dataclass(frozen=True)
class Case:
    """One rollout of one variant of a model.

    Attributes:
        weights: by checkpoint name; ``None`` for those of the archive's checkpoint.
        condition: of all chunks, ``[20, latent frames, height, width]``.
        inputs: the ``hidden_states`` that the set gives for single calls, by key.
        reuse_last_step: the last probe's keys and values are kept and nothing is committed.
    """

    outputs: tuple[Name, ...]
    config: LingBotWorldConfig
    dtype: torch.dtype
    weights: Mapping[str, torch.Tensor] | None
    condition: torch.Tensor
    camera: torch.Tensor
    prompt_embeds: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    seed: int
    flow_shift: float
    reuse_last_step: bool


def split_cases(golden: GoldenSet, names: Sequence[str], archive: Archive) -> list[Case]:
    """All rollouts of a set, one per prefix."""
    outputs: dict[str, list[Name]] = {}
    for full in names:
        name = parse(full)
        outputs.setdefault(name.prefix, []).append(name)
    return [_case(golden, prefix, wanted, archive) for prefix, wanted in outputs.items()]


def _case(golden: GoldenSet, prefix: str, wanted: list[Name], archive: Archive) -> Case:
    arrays = _Arrays(golden, prefix, archive)
    weights = arrays.weights()
    facts = _variant_facts(golden.manifest, prefix)
    text = f"{prefix} {golden.manifest.get('description', '')}"
    dtype = _dtype(golden, prefix, wanted, facts)
    inputs = {
        parse(full).key: golden.arrays[full][0]
        for full in golden.arrays
        if parse(full).prefix == prefix and parse(full).key.endswith(".hidden_states")
    }
    return Case(
        outputs=tuple(wanted),
        config=_config(golden, weights, facts, prefix, archive),
        dtype=dtype,
        weights=weights,
        condition=arrays.find("condition")[0].to(dtype),
        camera=arrays.find("camera")[0].to(dtype),
        prompt_embeds=arrays.find("prompt_embeds")[0].to(dtype),
        inputs=inputs,
        seed=int(_setting("seed", facts, golden.manifest, text, _DEFAULT_SEED)),
        flow_shift=_setting("flow_shift", facts, golden.manifest, text, _DEFAULT_SHIFT),
        reuse_last_step="reuse" in prefix,
    )


class _Arrays:
    """Looks inputs up: under the prefix, its parents, no prefix, then in a neighbouring set."""

    def __init__(self, golden: GoldenSet, prefix: str, archive: Archive) -> None:
        self.golden = golden
        parts = prefix.split(".") if prefix else []
        self.prefixes = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
        self.archive = archive

    def find(self, key: str) -> torch.Tensor:
        for prefix in self.prefixes:
            full = f"{prefix}.{key}" if prefix else key
            if full in self.golden.arrays:
                return self.golden.arrays[full]
        borrowed = self.archive.borrow(key, {})
        if borrowed is None:
            raise LookupError(f"no set gives the input {key}")
        return borrowed

    def weights(self) -> dict[str, torch.Tensor] | None:
        for prefix in self.prefixes:
            stem = f"{prefix}.weights." if prefix else "weights."
            found = {
                full.removeprefix(stem).removeprefix("transformer."): array
                for full, array in self.golden.arrays.items()
                if full.startswith(stem)
            }
            if found:
                return _unfused(found)
        return None


def _unfused(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint names for weights that were saved with fused self-attention projections."""
    plain: dict[str, torch.Tensor] = {}
    for name, array in weights.items():
        fused = re.fullmatch(r"(.*self_attn)\.(?:to_)?qkv\.(weight|bias)", name)
        if fused is None:
            plain[name] = array
            continue
        for part, rows in zip("qkv", array.chunk(3), strict=True):
            plain[f"{fused[1]}.{part}.{fused[2]}"] = rows.contiguous()
    return plain


def _variant_facts(manifest: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Settings that ``facts.variants`` holds for a prefix or a part of it, flattened."""
    merged: dict[str, Any] = {}
    for variants in find_facts(manifest.get("facts", {}), "variants"):
        entries = variants if isinstance(variants, Mapping) else _by_name(variants)
        for name in [*prefix.split("."), prefix]:
            merged.update(_flat(entries.get(name, {})))
    return merged


def _by_name(variants: object) -> dict[str, Any]:
    listed = variants if isinstance(variants, list) else []
    return {v["name"]: v for v in listed if isinstance(v, Mapping) and "name" in v}


def _flat(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    flat = {key: item for key, item in value.items() if not isinstance(item, Mapping)}
    for item in value.values():
        flat.update(_flat(item))
    return flat


def _config(
    golden: GoldenSet,
    weights: Mapping[str, torch.Tensor] | None,
    facts: Mapping[str, Any],
    prefix: str,
    archive: Archive,
) -> LingBotWorldConfig:
    base = first_fact(golden.manifest, "base_config") or first_fact(golden.manifest, "config")
    if not isinstance(base, Mapping):
        base = read_json(archive.checkpoint / "transformer" / "config.json")
        if weights is not None:
            base = {**base, **_sizes_of(weights, golden)}
    named = {
        field: int(match[1])
        for pattern, field in _NAMED_SIZES
        if (match := pattern.search(prefix)) is not None
    }
    raw = {**base, **named, **_fields_of(facts)}
    if "attention_head_dim" not in raw and "dim" in raw:
        raw["attention_head_dim"] = raw["dim"] // raw["num_attention_heads"]
    return LingBotWorldConfig.from_dict(_fields_of(raw))


def _fields_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the configuration among the keys, under their own or a shorter name."""
    kept = {_ALIASES[key]: value for key, value in raw.items() if key in _ALIASES}
    kept.update({key: value for key, value in raw.items() if key in _CONFIG_FIELDS})
    return {key: value for key, value in kept.items() if isinstance(value, int | float)}


def _sizes_of(weights: Mapping[str, torch.Tensor], golden: GoldenSet) -> dict[str, int]:
    """Sizes that the shapes of weights and keys tell."""
    dim = weights["patch_embedding.weight"].shape[0]
    keys = [
        array for name, array in golden.arrays.items() if name.endswith((".key", "attn_q_rope"))
    ]
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    sizes = {
        "num_layers": len(blocks),
        "in_channels": weights["patch_embedding.weight"].shape[1],
        "out_channels": weights["head.head.weight"].shape[0] // 4,
        "text_dim": weights["text_embedding.0.weight"].shape[1],
        "freq_dim": weights["time_embedding.0.weight"].shape[1],
        "ffn_dim": weights["blocks.0.ffn.0.weight"].shape[0],
    }
    if keys:
        head_dim = keys[0].shape[-1]
        sizes |= {"attention_head_dim": head_dim, "num_attention_heads": dim // head_dim}
    return sizes


def _dtype(
    golden: GoldenSet, prefix: str, wanted: list[Name], facts: Mapping[str, Any]
) -> torch.dtype:
    entries = golden.manifest["arrays"]
    low = any(entries[name.full]["dtype"] == "bfloat16" for name in wanted)
    named = f"{prefix} {facts.get('dtype', '')}"
    return torch.bfloat16 if low or re.search(r"bf16|bfloat16", named) else torch.float32


def _setting(
    key: str, facts: Mapping[str, Any], manifest: Mapping[str, Any], text: str, default: float
) -> float:
    """A number from the variant's facts, the set's facts, or a sentence."""
    fact = facts.get(key, first_fact(manifest, key))
    if isinstance(fact, int | float):
        return float(fact)
    said = re.search(rf"{key}[ =:_]*([\d.]*\d)", text)
    return default if said is None else float(said[1])
