"""All keys of a stage, and what to say of a name that is none of them."""

from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

from vllm_omni.config.server import ServerConfig
from vllm_omni.config.stage import StageSettings
from vllm_omni.diffusion.data import (
    DiffusionParallelConfig,
    KVCacheConfig,
    OmniDiffusionConfig,
    RayConfig,
    ReplicaConfig,
    SamplingDefaults,
)
from vllm_omni.errors import ConfigError
from vllm_omni.other_keys import MODEL_KEYS, PARALLEL_KEYS, STAGE_KEYS
from vllm_omni.setting import PARALLEL, Setting, Status, settings_of

OWNERS = (
    StageSettings, DiffusionParallelConfig, OmniDiffusionConfig, ReplicaConfig, RayConfig,
    KVCacheConfig, SamplingDefaults,
)  # fmt: skip
"""Classes whose fields are settings of a stage."""
KEYS: dict[str, Setting] = {
    one.key: one
    for one in (
        *(declared for owner in OWNERS for _, declared in settings_of(owner)),
        *STAGE_KEYS, *PARALLEL_KEYS, *MODEL_KEYS,
    )
}  # fmt: skip
"""Dotted key -> setting, those first that do something."""
SECTIONS = tuple(dict.fromkeys(one.section for one in KEYS.values()))
"""Mappings of a stage, each with its dot; ``""`` is the stage itself."""
ALIASES = {alias: one.key for one in KEYS.values() for alias in one.aliases}
"""Other name -> key."""
OTHER_FORMS = {
    "quantization": "quantization_config",
    "diffusion_quantization_config": "quantization_config",
    "attention_config": "attention_backend",
    "diffusion_attention_config": "attention_backend",
}
"""Other name -> section or key; the value may have another form, which is brought into shape."""
SERVER_FLAGS = {one.name: one.flags[0] for _, one in settings_of(ServerConfig)}

_KV = "model_config.ar_diffusion_kv_config"
_INSTEAD = {
    "gpu_memory_utilization": f"{_KV}.gpu_memory_fraction",
    "kv_cache_memory_bytes": f"{_KV}.gpu_memory_fraction",
    "block_size": f"{_KV}.page_tokens",
    "sliding_window": f"{_KV}.window_chunks",
    "sequence_parallel_size": "parallel_config.ulysses_degree",
    "sp": "parallel_config.ulysses_degree",
    "tp": "parallel_config.tensor_parallel_size",
    "load_format": "diffusion_load_format",
    "height": "model_config.ar_diffusion_height",
    "width": "model_config.ar_diffusion_width",
    "override_generation_config": "default_sampling_params",
}
"""Name of vLLM's -> key that stands for it here."""
_UNUSED = frozenset({
    "async_scheduling", "chat_template", "compilation_config", "cpu_offload_gb", "cuda_graph_sizes",
    "disable_log_requests",
    "disable_sliding_window", "download_dir", "enable_auto_tool_choice", "enable_chunked_prefill",
    "enable_lora", "enable_prefix_caching", "generation_config", "hf_config_path", "hf_overrides",
    "hf_token", "kv_cache_dtype", "kv_transfer_config", "limit_mm_per_prompt", "lora_modules",
    "max_cpu_loras", "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens",
    "max_seq_len", "max_seq_len_to_capture", "mm_processor_kwargs", "num_gpu_blocks_override",
    "num_lookahead_slots", "num_speculative_tokens", "reasoning_parser", "revision", "runner",
    "scheduling_policy", "skip_tokenizer_init", "speculative_config", "speculative_model",
    "swap_space", "task", "tokenizer", "tokenizer_mode", "tokenizer_revision", "tool_call_parser",
})  # fmt: skip
"""Names of vLLM's for what this model does not have."""
_PLACES = {
    **{one[:-1].rpartition(".")[2]: one[:-1] for one in SECTIONS if one},
    **{one.name: one.key for one in KEYS.values() if one.status is Status.USED},
}
"""Name without its sections -> section, or key of a setting that does something."""


def names_in(section: str) -> tuple[str, ...]:
    """Names that may stand in a section, given with its dot; ``""`` is the stage itself."""
    keys = (*KEYS, *ALIASES, *(one[:-1] for one in SECTIONS if one))
    inside = [
        key.removeprefix(section).partition(".")[0] for key in keys if key.startswith(section)
    ]
    if section == "":
        inside += [*OTHER_FORMS, *names_in(PARALLEL), "engine_args", "engine_extras", "runtime"]
    return tuple(dict.fromkeys(inside))


_LIKENESS = 0.75
"""How alike two words must be (0 to 1) for one to be taken for a slip of the other."""


def _is_slip(name: str, known: str) -> bool:
    """Whether each word of a name could be meant for that of another; ends alone say nothing."""
    pairs = zip(name.split("_"), known.split("_"), strict=False)
    return name.count("_") == known.count("_") and all(
        SequenceMatcher(None, one, other).ratio() >= _LIKENESS for one, other in pairs
    )


def suggest(name: str, local: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """What to say of an unknown name, in brackets after a blank; empty if nothing comes to mind.

    Args:
        local: names that are known where the unknown one stands.
        spell: how the reader writes a key, or one of the local names.
    """
    key = _INSTEAD.get(name) or OTHER_FORMS.get(name) or _PLACES.get(name)
    if key is not None:
        return f" (use {spell(key)})"
    if name in SERVER_FLAGS:
        return f" (the server alone has it: {SERVER_FLAGS[name]})"
    if name in _UNUSED:
        return " (not used by this model)"
    close = get_close_matches(name, [one for one in (*local, *_PLACES) if _is_slip(name, one)], n=1)
    return f" (did you mean {spell(_PLACES.get(close[0], close[0]))}?)" if close else ""


def refuse_all(where: str, unknown: Sequence[str], wrong: Sequence[str]) -> None:
    """Raise one error for everything that is wrong in one place; nothing if nothing is.

    Args:
        unknown: each unknown key, with its suggestion.
        wrong: a complete sentence for each other mistake.
    """
    listed = [f"Unknown diffusion config field(s): {', '.join(unknown)}"] if unknown else []
    if unknown or wrong:
        raise ConfigError(f"{where}: {'; '.join((*listed, *wrong))}")
