"""Layers of settings, merged from the weakest to the strongest while keeping their origin."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_omni.config.deploy import ParallelSection
from vllm_omni.config.schema import yaml_keys
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.errors import ConfigError, ConfigTypeError

FLAT_DEGREES = yaml_keys(ParallelSection)
"""Keys of ``parallel_config`` that may also stand beside it."""
ALIASES = {
    "diffusion_streaming_output": "streaming_output",
    "max_batch_size": "max_num_seqs",
    "quantization": "quantization_config",
    "diffusion_quantization_config": "quantization_config",
    "diffusion_attention_backend": "attention_backend",
    "diffusion_attention_config": "attention_config",
}
_DEPRECATED = {"max_batch_size", "diffusion_quantization_config", "diffusion_attention_backend"}
_NESTED_SPELLINGS = ("engine_extras", "engine_args")
_RUNTIME = ("devices", "num_replicas", "env")
OTHER_SPELLINGS = (*FLAT_DEGREES, *ALIASES, *_NESTED_SPELLINGS, "runtime")

Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one origin, in the one spelling of :class:`StageSection`."""

    origin: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Merged:
    """What the layers come to.

    Attributes:
        origins: dotted key of each leaf -> where its value came from.
        hidden: dotted key, origin and replacing origin of each leaf that a stronger layer hid.
    """

    values: Values
    origins: Mapping[str, str]
    hidden: tuple[tuple[str, str, str], ...] = ()


def canonical_stage(
    raw: Mapping[str, object], *, where: str, flat_wins: bool, warn: bool
) -> Values:
    """Bring the keys of a stage into one spelling.

    ``engine_args`` stand over flat keys, ``runtime`` over both. A flat degree moves into
    ``parallel_config``; where both name it, ``flat_wins`` decides. ``None`` means "not given".

    Raises:
        ConfigError: if one setting is given under two names.
    """
    values: Values = {key: value for key, value in raw.items() if value is not None}
    for nested in _NESTED_SPELLINGS:
        values |= _mapping(values.pop(nested, {}), f"{where}: {nested}")
    runtime = _mapping(values.pop("runtime", {}), f"{where}: runtime")
    for key, value in runtime.items():
        if key not in _RUNTIME:
            raise ConfigError(
                f"{where}: Unknown diffusion config field(s): 'runtime.{key}'; runtime has "
                f"{', '.join(_RUNTIME)}"
            )
        values[key] = value
    _resolve_aliases(values, where, warn=warn)
    _nest_degrees(values, where, flat_wins=flat_wins)
    if isinstance(values.get("quantization_config"), str):
        values["quantization_config"] = {"method": values["quantization_config"]}
    return values


def _mapping(value: object, where: str) -> Values:
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{where} must be a mapping, got {value!r}")
    return dict(value)


def _resolve_aliases(values: Values, where: str, *, warn: bool) -> None:
    for alias, name in ALIASES.items():
        if alias not in values:
            continue
        value = values.pop(alias)
        if warn and alias in _DEPRECATED:
            warnings.warn(
                f"{where}: {alias} is the older name of {name}", FutureWarning, stacklevel=2
            )
        same_is_fine = alias == "diffusion_streaming_output" and values.get(name) == value
        if name in values and not same_is_fine:
            raise ConfigError(f"{where}: {alias} and {name} are two names of one setting")
        values[name] = value


def _nest_degrees(values: Values, where: str, *, flat_wins: bool) -> None:
    nested = values.get("parallel_config", {})
    if isinstance(nested, DiffusionParallelConfig):
        nested = dataclasses.asdict(nested)
        if nested["sequence_parallel_size"] == 0:  # "not given" in the dataclass
            del nested["sequence_parallel_size"]
    nested = _mapping(nested, f"{where}: parallel_config")
    flat = {key: values.pop(key) for key in FLAT_DEGREES if key in values}
    both = {**nested, **flat} if flat_wins else {**flat, **nested}
    if both:
        values["parallel_config"] = both


def merge_layers(layers: Sequence[Layer]) -> Merged:
    """Merge from the weakest layer to the strongest; mappings merge key by key."""
    values: Values = {}
    origins: dict[str, str] = {}
    hidden: list[tuple[str, str, str]] = []
    for layer in layers:
        _forget_sequence_parallel_size(values, layer.values)
        for path, value in _leaves(layer.values):
            name = ".".join(path)
            if name in origins:
                hidden.append((name, origins[name], layer.origin))
            _put(values, path, value)
            origins[name] = layer.origin
    return Merged(values, origins, tuple(hidden))


def _forget_sequence_parallel_size(values: Values, stronger: Mapping[str, object]) -> None:
    """A stronger Ulysses degree takes the sequence parallel size, its double, with it."""
    below, above = values.get("parallel_config"), stronger.get("parallel_config")
    if isinstance(below, dict) and isinstance(above, Mapping) and "ulysses_degree" in above:
        below.pop("sequence_parallel_size", None)


def _leaves(
    values: Mapping[str, object], prefix: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], object]]:
    if not values and prefix:
        return [(prefix, {})]
    leaves: list[tuple[tuple[str, ...], object]] = []
    for key, value in values.items():
        path = (*prefix, str(key))
        # The quantisation method and its options belong together.
        if isinstance(value, Mapping) and path != ("quantization_config",):
            leaves += _leaves(value, path)
        else:
            leaves.append((path, value))
    return leaves


def _put(values: Values, path: tuple[str, ...], value: object) -> None:
    *parents, last = path
    for parent in parents:
        below = values.get(parent)
        if not isinstance(below, dict):
            below = values[parent] = {}
        values = below
    if value != {} or not isinstance(values.get(last), dict):  # an empty mapping says nothing
        values[last] = value
