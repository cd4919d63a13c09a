"""The flags of ``vllm-omni serve``, each taken from its setting; typed, or from a YAML file."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from vllm_omni.config.deploy_file import read_mapping
from vllm_omni.config.keys import KEYS
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.command_parser import CommandParser, integer, number
from vllm_omni.errors import ConfigError
from vllm_omni.other_keys import FLAG_KEYS
from vllm_omni.setting import PARALLEL, Setting, Status, settings_of
from vllm_omni.system_errors import sentence
from vllm_omni.wording import shown

_METAVARS = {"int": "INT", "number": "NUMBER", "text": "TEXT", "list": "WORD"}


@dataclass(frozen=True, slots=True)
class Flag:
    """The flags of one setting.

    Attributes:
        area: whose setting it is: ``engine``, ``server``, ``serve`` (a step of the command) or
            ``refuse`` (nothing takes it).
        group: heading in the help.
    """

    area: str
    group: str
    setting: Setting

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings; each dash inside may also be an underscore."""
        return self.setting.flags

    @property
    def target(self) -> str:
        """Where the parser keeps the value."""
        return f"{self.area}.{self.setting.key}"

    @property
    def help(self) -> str:
        """What it does, and what happens without it."""
        setting = self.setting
        if setting.status is Status.REFUSED and setting.passes:
            return f"only {' or '.join(map(shown, setting.passes))}: {setting.help}"
        if setting.status is not Status.USED:
            return f"{setting.status.value}: {setting.help}"
        default = setting.unsaid if setting.kind is bool else setting.default_words
        return f"{setting.help} (default: {default})" if default else setting.help

    @property
    def has_negative(self) -> bool:
        """Whether a switch has a ``--no-`` form: a deploy file may have switched it on."""
        return self.setting.kind is bool and self.area == "engine"

    def is_negative(self, name: str) -> bool:
        """Whether a switch sets false: ``--no-web-page`` of ``web_page``."""
        spelled = name[2:].replace("-", "_")
        return spelled.startswith(("no_", "disable_")) and spelled != self.setting.name


_GROUPS = {Status.REFUSED: "refused", Status.NO_EFFECT: "without effect"}


def _own(key: str, kind: object, text: str) -> Flag:
    flag = f"--{key.replace('_', '-')}"
    return Flag("serve", "model and configuration", Setting(key, kind, text, flags=(flag,)))


def _section(key: str, flags: str, text: str) -> Flag:
    return Flag("engine", "execution", Setting(key, object, text, flags=tuple(flags.split())))


def _of_engine(setting: Setting) -> Flag:
    group = "parallelism" if setting.section == PARALLEL else "execution"
    return Flag("engine", _GROUPS.get(setting.status, group), setting)


FLAGS = (
    _own("model", str, "checkpoint directory or hub id; the same as MODEL"),
    _own("omni", bool, "choose this server where vLLM is installed"),
    _own("config", str, "YAML file of flags, without their dashes; those of the line win"),
    _own("deploy_config", str,
         "deploy file; a bare name is also looked up among the packaged ones"),
    _own("stage_overrides", object,
         'per-stage values over everything else: {"0": {"KEY": VALUE}}'),
    _section("default_sampling_params", "--default-sampling-params",
             'defaults of requests, over those of the file: {"0": {"KEY": VALUE}}'),
    _section("quantization_config", "--diffusion-quantization-config",
             'quantisation of vLLM\'s linears: {"method": "fp8"}'),
    _section("attention_config", "--diffusion-attention-config -dac",
             'implementation of the attention: {"backend": NAME}'),
    *(_of_engine(one) for one in KEYS.values() if one.flags and one.status is Status.USED),
    *(Flag("server", "server", one) for _, one in settings_of(ServerConfig)),
    *(_of_engine(one) for one in KEYS.values() if one.flags and one.status is not Status.USED),
    *(Flag("refuse", _GROUPS[one.status], one) for one in FLAG_KEYS),
)  # fmt: skip
"""All flags of the command, grouped by what comes of them."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add each flag; a flag that is not typed leaves no trace in the namespace."""
    parser.allow_abbrev = False
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        long = [name[2:] for name in flag.names if name.startswith("--")]
        underscored = [f"--{name.replace('-', '_')}" for name in long]
        hidden = [name for name in underscored if name not in flag.names]
        _add(groups[flag.group], flag, flag.names, flag.help.replace("%", "%%"))
        _add(groups[flag.group], flag, hidden, argparse.SUPPRESS)


def _add(group: argparse._ArgumentGroup, flag: Flag, names: Iterable[str], help_text: str) -> None:
    setting = flag.setting
    if setting.kind is bool:
        for name in names:
            positive = argparse.BooleanOptionalAction if flag.has_negative else "store_true"
            action = "store_false" if flag.is_negative(name) else positive
            group.add_argument(
                name, action=action, dest=flag.target, default=argparse.SUPPRESS, help=help_text
            )
    elif names:
        words = "{" + ",".join(setting.words) + "}" if setting.words else None
        group.add_argument(
            *names,
            type=partial(_convert, setting),
            nargs="+" if setting.kind is tuple else None,
            metavar=words or _METAVARS.get(setting.type_words, "JSON"),
            dest=flag.target,
            default=argparse.SUPPRESS,
            help=help_text,
        )


def _convert(setting: Setting, text: str) -> object:
    """From a word of the command line to a value; a word that cannot be one ends the process."""
    value = _CONVERTERS.get(setting.kind, _json)(text)
    if setting.words:
        try:
            value = setting.checked(value, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON ({error}), got {shown(text)}") from None


_CONVERTERS: dict[object, Callable[[str], object]] = {
    int: integer, float: number, str: str, tuple: str,
}  # fmt: skip


def typed_values(args: argparse.Namespace, area: str) -> dict[str, object]:
    """Key -> value of the flags of an area that were typed."""
    prefix = f"{area}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }


def refuse_by_name(args: argparse.Namespace) -> None:
    """Refuse flags that this command knows and nothing can honour."""
    typed = typed_values(args, "refuse")
    for one in FLAG_KEYS:
        if one.key in typed:
            one.refuse(typed[one.key], one.flags[0])


class _FileParser(CommandParser):
    """Takes the flags of a file as if they were typed; what is wrong names the file."""

    def __init__(self, file: str) -> None:
        super().__init__(prog="--config")
        self._file = file
        add_flags(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--config {self._file}: {message}")

    def words_of(self, key: str, value: object) -> Iterator[str]:
        """A key and its value as words of a command line; none where nothing is given."""
        flag = f"--{key}"
        action = self._option_string_actions.get(flag)
        if value is False and action is not None and action.nargs == 0:
            if f"--no-{key}" in self._option_string_actions:
                yield f"--no-{key}"
        elif value is True or (isinstance(value, list) and (action is None or action.nargs)):
            yield flag
            yield from map(str, value if isinstance(value, list) else ())
        elif value is not None:
            yield f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def with_config_file(args: argparse.Namespace) -> argparse.Namespace:
    """Typed flags, and those of the file of ``--config`` that were not typed.

    Raises:
        ConfigError: naming the file and the key that is wrong.
    """
    typed = vars(args)
    file = typed_values(args, "serve").get("config")
    if file is None:
        return args
    try:
        listed = read_mapping(Path(str(file)))
    except OSError as error:
        raise ConfigError(f"--config: {sentence(error)}") from None
    if "config" in listed:
        raise ConfigError(f"--config {file}: a file cannot name another one")
    parser = _FileParser(str(file))
    words = [word for key, value in listed.items() for word in parser.words_of(key, value)]
    filed = vars(parser.parse_args(words))
    if typed.keys() & {"serve.model_tag", "serve.model"}:
        filed.pop("serve.model", None)
    return argparse.Namespace(**filed | typed)
