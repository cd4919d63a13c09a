"""Layers of settings: brought into one spelling, checked, and merged while keeping their origin."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_omni.config.keys import (
    ALIASES,
    KEYS,
    OTHER_FORMS,
    SECTIONS,
    names_in,
    refuse_all,
    suggest,
)
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.errors import ConfigError, ConfigTypeError
from vllm_omni.setting import PARALLEL, Setting
from vllm_omni.wording import shown

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
    return Layer(origin, reader.result())


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

    def result(self) -> Values:
        refuse_all(self.where, self.unknown, self.wrong)
        return self.values


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
