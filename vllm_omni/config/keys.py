"""All keys of a stage, what to say of a name that is none, and layers of values in any spelling."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from vllm_omni.errors import ConfigError, ConfigTypeError
from vllm_omni.other_keys import MODEL_KEYS, PARALLEL_KEYS, STAGE_KEYS
from vllm_omni.setting import PARALLEL, Setting, Status, settings_of
from vllm_omni.wording import shown

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


# ------------------------------------------------------------------ layers of values

COMMAND_LINE = "command line"
"""Source whose settings messages name by their flags."""
_OLDER_NAMES = {"max_batch_size", "diffusion_attention_backend"}
_NESTED_SPELLINGS = ("engine_extras", "engine_args")
_RUNTIME = ("devices", "num_replicas", "env")
_TAKES_ALONG = {
    "parallel_config.ulysses_degree": "parallel_config.sequence_parallel_size",
    "quantization_config.method": "quantization_config.ignored_layers",
}
"""Key whose value makes a weaker value of another key meaningless."""

Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one origin: dotted key -> checked value; ``None`` asks for the default."""

    origin: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Merged:
    """What the layers come to.

    Attributes:
        values: dotted key -> value.
        origins: dotted key -> where the value came from.
        hidden: dotted key, origin and replacing origin of each value that a stronger layer hid.
    """

    values: Mapping[str, object]
    origins: Mapping[str, str]
    hidden: tuple[tuple[str, str, str], ...] = ()


def read_layer(
    raw: Mapping[str, object], origin: str, *, where: str, flat_wins: bool = True, warn: bool = True
) -> Layer:
    """Check the settings of one origin, in any of their spellings.

    Args:
        raw: a stage as it is written. ``None`` in the stage itself means "not given".
        where: what messages name as the place.
        flat_wins: whether a degree in the stage itself stands over the same one in
            ``parallel_config``.
        warn: whether an older name is reported.

    Raises:
        ConfigError: one line that names everything that is wrong.
    """
    given = _unfolded({key: value for key, value in raw.items() if value is not None}, where)
    flat = {name: given.pop(name) for name in names_in(PARALLEL) if name in given}
    if flat:
        nested = _mapping(given.get(PARALLEL[:-1], {}), f"{where}: {PARALLEL[:-1]}")
        given[PARALLEL[:-1]] = nested | flat if flat_wins else flat | nested
    reader = _Reader(where, warn=warn)
    reader.read(given, "")
    refuse_all(where, reader.unknown, reader.wrong)
    return Layer(origin, reader.values)


@dataclass(slots=True)
class _Reader:
    """Collects the values of one origin, and everything that is wrong with them."""

    where: str
    warn: bool
    values: Values = field(default_factory=dict)
    spelled: dict[str, tuple[str, object]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def read(self, raw: Mapping[str, object], section: str) -> None:
        for name, value in raw.items():
            key = f"{section}{name}"
            if ALIASES.get(key, key) in KEYS:
                self._take(key, KEYS[ALIASES.get(key, key)], value)
            elif f"{key}." not in SECTIONS:
                self.unknown.append(f"{key!r}{suggest(name, names_in(section), _within(section))}")
            elif value is not None:
                self.read(_mapping(value, f"{self.where}: {key}"), f"{key}.")

    def _take(self, spelled: str, setting: Setting, value: object) -> None:
        before, same = self.spelled.setdefault(setting.key, (spelled, value))
        if same is not value and same != value:
            twice = f"{before} and {spelled} are two names of one setting"
            self.wrong.append(f"{spelled}: is given twice" if before == spelled else twice)
            return
        if self.warn and spelled in _OLDER_NAMES:
            text = f"{self.where}: {spelled} is the older name of {setting.key}"
            warnings.warn(text, FutureWarning, stacklevel=2)
        if value is None:
            self.values[setting.key] = None
            return
        try:
            checked = setting.checked(value, name_of(setting, self.where, spelled))
        except ConfigError as error:
            self.wrong.append(str(error))
            return
        if setting.is_open and isinstance(checked, Mapping):
            self.values |= {f"{setting.key}.{name}": inner for name, inner in checked.items()}
        else:
            self.values[setting.key] = checked


def name_of(setting: Setting, where: str, spelled: str = "") -> str:
    """What a message calls a setting: its flag on the command line, else its key as spelled."""
    if where == COMMAND_LINE and setting.flags:
        return setting.flags[0]
    return spelled or setting.key


def _within(section: str) -> Callable[[str], str]:
    """How a key is named to a reader who stands in a section."""
    return lambda key: key if not section or "." in key else f"{key} of the stage itself"


def _unfolded(raw: Mapping[str, object], where: str) -> Values:
    """A stage without ``engine_args``, ``runtime`` and settings in another form."""
    given: Values = dict(raw)
    for nested in _NESTED_SPELLINGS:
        given |= _mapping(given.pop(nested, {}), f"{where}: {nested}")
    for key, value in _mapping(given.pop("runtime", {}), f"{where}: runtime").items():
        if key not in _RUNTIME:
            raise ConfigError(
                f"{where}: Unknown diffusion config field(s): 'runtime.{key}'; runtime has "
                f"{', '.join(_RUNTIME)}"
            )
        given[key] = value
    for other, name in OTHER_FORMS.items():
        if other not in given:
            continue
        if name in given:
            raise ConfigError(f"{where}: {other} and {name} are two names of one setting")
        value = given.pop(other)
        given[name] = _attention_backend(value, where) if name == "attention_backend" else value
    if isinstance(given.get("quantization_config"), str):
        given["quantization_config"] = {"method": given["quantization_config"]}
    return given


def _attention_backend(config: object, where: str) -> str:
    chosen = config
    for key in ("default", "backend"):
        if isinstance(chosen, Mapping) and set(chosen) == {key}:
            chosen = chosen[key]
    if not isinstance(chosen, str):
        raise ConfigError(
            f'{where}: attention_config must be {{"backend": NAME}} or '
            f'{{"default": {{"backend": NAME}}}}, got {shown(config)}'
        )
    return chosen


def _mapping(value: object, where: str) -> Values:
    if isinstance(value, DiffusionParallelConfig):  # states all degrees
        return dict.fromkeys(names_in(PARALLEL)) | dataclasses.asdict(value)
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{where} must be a mapping of names to values, got {shown(value)}")
    return dict(value)


def merge_layers(layers: Sequence[Layer]) -> Merged:
    """Merge from the weakest layer to the strongest, key by key."""
    values: Values = {}
    origins: dict[str, str] = {}
    hidden: list[tuple[str, str, str]] = []
    for layer in layers:
        for key in layer.values:
            values.pop(_TAKES_ALONG.get(key, ""), None)
        for key, value in layer.values.items():
            if key in values:
                hidden.append((key, origins[key], layer.origin))
            values[key] = value
            origins[key] = layer.origin
    return Merged(values, origins, tuple(hidden))
