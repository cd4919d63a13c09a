"""argparse fed from a table of flags, and the values that were typed read back by target."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_omni.config.deploy import ParallelSection
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.layers import ALIASES
from vllm_omni.config.schema import status_of
from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line.

    Attributes:
        names: all spellings; each dash inside may also be an underscore.
        kind: ``str``, ``int``, ``float`` or ``json``; ``switch`` sets true, ``off`` sets false,
            ``bool`` has a ``--no-`` form, ``list`` takes several words.
        target: ``AREA.KEY``: a key of the deploy file's stage (``engine``), a field of the server
            settings (``server``), a step of the command itself (``serve``), or nothing
            (``refuse``).
        group: heading in the help.
        shown_default: what happens without the flag, in words.
        refused: why only neutral values pass (area ``refuse``).
        neutral: values that pass all the same.
    """

    names: tuple[str, ...]
    kind: str
    target: str
    group: str
    help: str
    choices: tuple[str, ...] = ()
    shown_default: str = ""
    refused: str | None = None
    neutral: tuple[object, ...] = ()

    @property
    def key(self) -> str:
        """Key without the area."""
        return self.target.partition(".")[2]

    @property
    def status(self) -> tuple[str, str] | None:
        """``("refused" | "no effect", reason)``, ``None`` for an ordinary flag."""
        if self.refused is not None:
            return "refused", self.refused
        if not self.target.startswith("engine."):
            return None
        key = ALIASES.get(self.key, self.key)
        for section in (EngineArguments, ParallelSection):
            if key in section.model_fields:
                return status_of(section.model_fields[key])
        return None

    @property
    def full_help(self) -> str:
        """Help with default and status."""
        parts = [self.help]
        if self.shown_default:
            parts.append(f"(default: {self.shown_default})")
        if self.status is not None:
            parts.append("({}: {})".format(*self.status))
        return " ".join(parts)


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add each flag; a flag that is not typed leaves no trace in the namespace."""
    parser.allow_abbrev = False
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag, flag.names, flag.full_help.replace("%", "%%"))
        underscored = [_underscored(name) for name in flag.names]
        hidden = tuple(name for name in underscored if name not in flag.names)
        if hidden:
            _add(groups[flag.group], flag, hidden, argparse.SUPPRESS)


def _underscored(name: str) -> str:
    return name[:2] + name[2:].replace("-", "_")


def _add(
    group: argparse._ArgumentGroup,
    flag: Flag,
    names: tuple[str, ...],
    text: str,
) -> None:
    if flag.kind in _ACTIONS:
        group.add_argument(
            *names,
            action=_ACTIONS[flag.kind],
            dest=flag.target,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.kind.upper()
    several = flag.kind == "list"
    group.add_argument(
        *names,
        type=_CONVERTERS[flag.kind],
        nargs="+" if several else None,
        choices=flag.choices or None,
        metavar="WORD" if several else metavar,
        dest=flag.target,
        default=argparse.SUPPRESS,
        help=text,
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


_ACTIONS: dict[str, str | type[argparse.Action]] = {
    "switch": "store_true",
    "off": "store_false",
    "bool": argparse.BooleanOptionalAction,
}
_CONVERTERS = {
    "str": str,
    "int": int,
    "float": float,
    "json": _json,
    "list": str,
}


def typed_values(args: argparse.Namespace, area: str) -> dict[str, object]:
    """Key -> value of the flags of an area that were typed."""
    prefix = f"{area}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }


def refuse_by_name(args: argparse.Namespace, flags: Iterable[Flag]) -> None:
    """Refuse flags that this command knows and cannot honour.

    Raises:
        ConfigError: naming the first one.
    """
    typed = vars(args)
    for flag in flags:
        if flag.refused is not None and typed.get(flag.target, None) not in {None, *flag.neutral}:
            raise ConfigError(f"{flag.names[0]} {typed[flag.target]} is refused: {flag.refused}")
