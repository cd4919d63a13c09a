"""What all sections of a configuration share: closed, strict, with refusals by name.

Three kinds of keys exist beside ordinary ones, all declared where the field is:

* :func:`ignored` keys are accepted and reported once as "no effect"; none of them changes results.
* :func:`refused` keys are known but cannot be honoured; only their neutral values pass.
* everything else is an unknown key, an error with a suggestion.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic.fields import FieldInfo

from vllm_omni.config.vllm_names import hint
from vllm_omni.errors import ConfigError

AnySection = TypeVar("AnySection", bound="Section")

HIDDEN = "***"
"""Stands for what may be a secret: the values of ``env``."""


class Section(BaseModel):
    """A mapping of known keys. Every key is optional; ``None`` means "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_by_name(self) -> "Section":
        for key, field, value in set_fields(self):
            reason = _note(field, "refused")
            if reason is not None and value not in neutral_values(field):
                raise ValueError(f"{key}={value!r} is refused: {reason}")
        return self


def ignored(reason: str, *, quiet: Sequence[JsonValue] = ()) -> FieldInfo:
    """Field that is accepted without effect; ``quiet`` values are not even reported."""
    return Field(json_schema_extra={"no_effect": reason, "neutral": list(quiet)})


def refused(reason: str, *, neutral: Sequence[JsonValue] = (False,)) -> FieldInfo:
    """Field whose only accepted values are the neutral ones."""
    return Field(json_schema_extra={"refused": reason, "neutral": list(neutral)})


def yaml_key(name: str, field: FieldInfo) -> str:
    """The key of a field in the file."""
    return field.alias or name


def yaml_keys(section: type[Section]) -> tuple[str, ...]:
    """All keys of a section, in the order of their declaration."""
    return tuple(yaml_key(name, field) for name, field in section.model_fields.items())


def set_fields(section: Section) -> Iterator[tuple[str, FieldInfo, object]]:
    """Key, declaration and value of each field that was given and is not ``None``."""
    values = dict(section)
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set and values[name] is not None:
            yield yaml_key(name, field), field, values[name]


def no_effect_notes(section: Section, prefix: str = "") -> Iterator[str]:
    """One line for each key, at any depth, that was given and does nothing."""
    for key, field, value in set_fields(section):
        path = f"{prefix}{key}"
        if isinstance(value, Section):
            yield from no_effect_notes(value, f"{path}.")
            continue
        reason = _note(field, "no_effect")
        if reason is not None and value not in neutral_values(field):
            yield f"{path}={value!r} has no effect: {reason}"


def status_of(field: FieldInfo) -> tuple[str, str] | None:
    """``("refused" | "no effect", reason)`` of a field that is not an ordinary one."""
    for key, word in (("refused", "refused"), ("no_effect", "no effect")):
        reason = _note(field, key)
        if reason is not None:
            return word, reason
    return None


def _note(field: FieldInfo, key: str) -> str | None:
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) and key in extra else None


def neutral_values(field: FieldInfo) -> list[object]:
    """Values of an ignored or refused field that pass in silence."""
    extra = field.json_schema_extra
    neutral = extra["neutral"] if isinstance(extra, dict) else []
    return list(neutral) if isinstance(neutral, list) else []


def suggest(name: str, known: Sequence[str]) -> str:
    """`` (use x)`` for a name of vLLM's, `` (did you mean 'x'?)`` for the closest known name."""
    vllm = hint(name)
    if vllm is not None:
        return f" ({vllm})"
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_section(
    section: type[AnySection],
    values: Mapping[str, object],
    *,
    where: str,
    extra_keys: Sequence[str] = (),
) -> AnySection:
    """Validate ``values``.

    Args:
        where: what the message names as the place, for example ``"deploy.yaml: stage 0"``.
        extra_keys: further spellings that suggestions may name.

    Raises:
        ConfigError: one line that lists everything that is wrong.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_describe(error, section, where, extra_keys)) from None


def _describe(
    error: ValidationError, section: type[Section], where: str, extra_keys: Sequence[str]
) -> str:
    unknown, wrong = [], []
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        if problem["type"] == "extra_forbidden":
            owner = _section_at(section, location[:-1])
            known = [*yaml_keys(owner), *(extra_keys if len(location) == 1 else ())]
            unknown.append(f"{_dotted(location)!r}{suggest(str(location[-1]), known)}")
        else:
            text = problem["msg"].removeprefix("Value error, ")
            shown = HIDDEN if "env" in location else repr(problem["input"])
            given = "" if problem["type"] == "value_error" else f", got {shown}"
            wrong.append(f"{_dotted(location)}: {text}{given}" if location else text)
    if unknown:
        wrong.insert(0, f"Unknown diffusion config field(s): {', '.join(unknown)}")
    return f"{where}: " + "; ".join(wrong)


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _section_at(section: type[Section], location: tuple[int | str, ...]) -> type[Section]:
    for part in location:
        fields = {yaml_key(name, field): field for name, field in section.model_fields.items()}
        if part in fields:
            section = nested_section(fields[str(part)]) or section
    return section


def nested_section(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or ``None`` for a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
