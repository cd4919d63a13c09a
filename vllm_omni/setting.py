"""How a setting is declared: once, as a field of the class whose reader acts on it.

    max_queued: Annotated[NotNegative, setting("sessions that may wait", "--max-queued")] = 16

The key of the deploy file, the keyword argument, the flag, the check of the value, its default, its
row in the reference pages and its line in the start-up log all come from this one declaration. Keys
that are known but do nothing here are listed in :mod:`vllm_omni.other_keys`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_omni.errors import ConfigError, UnsupportedParallelismError
from vllm_omni.wording import Problem, one_of, problems, refuse, shown

Value = TypeVar("Value")
Built = TypeVar("Built")

HIDDEN = "***"
"""Stands in messages and logs for a value that may be a secret."""
PARALLEL = "parallel_config."
"""Leading part of the keys that say how the ranks share one world."""

_KINDS: dict[object, str] = {
    bool: "bool", int: "int", float: "number", str: "text", list: "list", tuple: "list",
    dict: "mapping",
}  # fmt: skip

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class Status(Enum):
    """What comes of a key."""

    USED = "used"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting of the deploy file or the command line.

    Attributes:
        key: name in a stage of the deploy file, with dots where it is nested.
        type: what values are checked against, strictly; ``None`` always means "not given".
        help: what it does; for a key that is refused or has no effect, why.
        default: value where nothing is given.
        flags: its spellings on the command line, none for a key of the deploy file alone.
        unsaid: what the default means, where the value does not tell.
        aliases: other keys that mean the same.
        is_open: a mapping whose own keys are free; it merges key by key.
        secret: values are never shown.
        passes: values that a refused key takes, and that a key without effect does not report.
    """

    key: str
    type: Any
    help: str
    default: object = None
    flags: tuple[str, ...] = ()
    unsaid: str = ""
    aliases: tuple[str, ...] = ()
    is_open: bool = False
    secret: bool = False
    status: Status = Status.USED
    passes: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """The key without the sections around it."""
        return self.key.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The sections around the key, each with its dot; empty for a key of the stage itself."""
        return self.key[: len(self.key) - len(self.name)]

    @property
    def default_words(self) -> str:
        """The default for a reader; empty where there is none."""
        if self.unsaid or self.default in {None, ()}:
            return self.unsaid
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return self.default if isinstance(self.default, str) else shown(self.default)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that are accepted, empty where there is no such list."""
        return _words(self.type)

    @cached_property
    def kind(self) -> object:
        """The plain type of a value: ``int`` for ``Annotated[int, ...] | None``."""
        return _plain_type(self.type)

    @property
    def type_words(self) -> str:
        """The kind of value for a reader."""
        return ", ".join(self.words) or _KINDS.get(self.kind, "any")

    @cached_property
    def _adapter(self) -> TypeAdapter:
        return TypeAdapter(self.type, config=ConfigDict(strict=True))

    def checked(self, value: object, name: str) -> object:
        """The value as its consumer reads it.

        Args:
            name: what a message calls the setting; empty where its reader knows.

        Raises:
            ConfigError: what was needed and what was got.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ConfigError("; ".join(self._said(one, name) for one in problems(error))) from None

    def _said(self, problem: Problem, name: str) -> str:
        text = f"{problem.requirement}, got {HIDDEN}" if self.secret else problem.text
        label = ".".join(part for part in (name, *problem.path) if part)
        return f"{label}: {text}" if label else text

    def refuse(self, value: object, name: str) -> None:
        """Refuse a value of a key that cannot be honoured.

        Raises:
            ConfigError: why; :class:`UnsupportedParallelismError` for a parallel degree.
        """
        if self.status is Status.REFUSED and value not in self.passes:
            kind = UnsupportedParallelismError if self.section == PARALLEL else ConfigError
            raise kind(f"{name}={shown(value)} is refused: {self.help}")


def no_effect_notes(values: Mapping[str, object], known: Mapping[str, Setting]) -> list[str]:
    """One line for each value, by its key, that was accepted and does nothing."""
    return [
        f"{key}={shown(value)} has no effect: {known[key].help}"
        for key, value in values.items()
        if key in known and known[key].status is Status.NO_EFFECT
        and value is not None and value not in known[key].passes
    ]  # fmt: skip


def setting(
    text: str,
    flags: str = "",
    *,
    key: str = "",
    unsaid: str = "",
    aliases: str = "",
    secret: bool = False,
) -> Setting:
    """Annotation that makes a field of a dataclass a setting; type and default are the field's.

    Args:
        text: what it does, in one line.
        flags: spellings on the command line, separated by spaces.
        key: key of the deploy file where it is not the field's name; one that ends in a dot is a
            section, and the field's name follows.
        unsaid: what the default means, where the value does not tell.
        aliases: other keys that mean the same, separated by spaces.
        secret: values are never shown.
    """
    return Setting(
        key, None, text, None, tuple(flags.split()), unsaid, tuple(aliases.split()), secret=secret
    )


@cache
def settings_of(owner: type) -> tuple[tuple[str, Setting], ...]:
    """Name and setting of each field of a dataclass that is annotated as one."""
    found = []
    for one in fields(owner):
        notes = get_args(one.type) if get_origin(one.type) is Annotated else ()
        for declared in notes:
            if isinstance(declared, Setting):
                is_whole = declared.key[-1:] not in {"", "."}
                whole = replace(
                    declared,
                    key=declared.key if is_whole else declared.key + one.name,
                    type=one.type,
                    default=None if one.default is MISSING else one.default,
                    is_open=one.default_factory is dict,
                )
                found.append((one.name, whole))
    return tuple(found)


def construct(owner: type[Built], values: Mapping[str, object], **others: object) -> Built:
    """Make a dataclass of settings from key -> checked value; what is missing has its default.

    Args:
        others: fields that are no settings, or whose value was decided elsewhere.
    """
    given: dict[str, object] = {}
    for name, declared in settings_of(owner):
        if declared.is_open:
            inside = f"{declared.key}."
            given[name] = {
                key.removeprefix(inside): value
                for key, value in values.items()
                if key.startswith(inside)
            }
        elif values.get(declared.key) is not None:
            given[name] = values[declared.key]
    return owner(**given | others)


def values_of(owner: object) -> Iterable[tuple[Setting, object]]:
    """Setting and value of each declared field of an object."""
    assert is_dataclass(owner)
    return ((one, getattr(owner, name)) for name, one in settings_of(type(owner)))


def check_fields(owner: object, *, by_flag: bool = False) -> None:
    """Check every setting of an object, however it was made."""
    for declared, value in values_of(owner):
        if value is not None:
            declared.checked(value, declared.flags[0] if by_flag else declared.key)


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A validator of words: any case, and some other words for the same.

    Attributes:
        known: the words.
        others: another word -> the word that it stands for.
    """

    known: tuple[str, ...]
    others: Mapping[str, str]

    def __call__(self, value: str) -> str:
        """The known word that is meant."""
        word = self.others.get(value.lower(), value).lower()
        for known in self.known:
            if known.lower() == word:
                return known
        raise refuse(f"must be {one_of(self.known)}")


def _plain_type(hint: object) -> object:
    if get_origin(hint) is Annotated:
        return _plain_type(get_args(hint)[0])
    if get_origin(hint) in {Union, UnionType}:
        given = [part for part in get_args(hint) if part is not type(None)]
        return _plain_type(given[0]) if len(given) == 1 else object
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    return get_origin(hint) or hint


def _words(hint: object) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) is Annotated:
        for note in get_args(hint)[1:]:
            if isinstance(note, AfterValidator) and isinstance(note.func, Names):
                return note.func.known
    return tuple(word for part in get_args(hint) for word in _words(part))


def names(known: Iterable[str], others: Mapping[str, str] | None = None) -> AfterValidator:
    """Annotation of a text that must be one of ``known``; see :class:`Names`."""
    return AfterValidator(Names(tuple(known), others or {}))
