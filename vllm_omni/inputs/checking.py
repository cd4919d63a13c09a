"""How input becomes a checked model: one base class, one dialect of error texts, no torch.

Every way in (WebSocket, HTTP, Python, deploy files) parses with :func:`validate`, so that the same
mistake gets the same words everywhere.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_omni.errors import InvalidRequestError

_GOT_LIMIT = 80
_LARGEST_SHOWN = 10**20
"""Python itself refuses to write down integers of several thousand digits."""
_WORDS = {
    "missing": "is required",
    "none_required": "must be absent or null",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "extra_forbidden": "is not known here",
}
"""Pydantic's kinds of error in our words."""
_SAY_IT_ALL = {"missing", "refused", "value_error"}
"""Kinds of error whose text needs no "got"."""


class Checked(BaseModel):
    """Base of all models of input: frozen, strict about kinds, without NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


Model = TypeVar("Model", bound=BaseModel)


def refuse(message: str) -> PydanticCustomError:
    """Make the error that a validator raises; its text is told as it stands."""
    return PydanticCustomError("refused", "{text}", {"text": message})


def validate(model: type[Model], raw: Mapping[str, object], *, written: bool = False) -> Model:
    """Parse a mapping from outside.

    Args:
        written: whether numbers may stand as their digits in text, as they do in forms, and whole
            numbers with a point, as they do in JavaScript.

    Raises:
        InvalidRequestError: naming the first field that is wrong, in the order of declaration.
    """
    require_text(raw)
    try:
        return model.model_validate(raw, context=WRITTEN if written else None)
    except ValidationError as error:
        raise _refusal(error, model) from None


WRITTEN = "written"
"""Validation context in which numbers may stand as text; see :func:`validate`."""


def require_text(raw: object) -> None:
    """Refuse text that UTF-8 cannot hold, anywhere in a structure, keys included.

    JSON can spell half of a surrogate pair (``"\\ud83d"``, an emoji that was cut in two). No
    answer, log or file could repeat such a text.

    Raises:
        InvalidRequestError: naming the field that holds it.
    """
    waiting: list[tuple[str, object]] = [("", raw)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, str):
            _require_encodable(value, field)
        elif isinstance(value, Mapping):
            waiting.extend((field, key) for key in value)
            within = f"{field}." if field else ""
            waiting.extend((f"{within}{key}", inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            waiting.extend((field, inner) for inner in value)


def _require_encodable(text: str, field: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "holds half of a surrogate pair, which is no character; send whole ones",
            field=_encodable(field) or None,
        ) from None


def _encodable(field: str) -> str:
    return field.encode("utf-8", "backslashreplace").decode("utf-8")


def problem_text(problem: ErrorDetails) -> str:
    """Say in our words what pydantic found wrong with one value, and what the value was."""
    kind = problem["type"]
    facts = {name: _figure(fact) for name, fact in problem.get("ctx", {}).items()}
    text = _WORDS[kind].format(**facts) if kind in _WORDS else problem["msg"]
    text = text.removeprefix("Value error, ")
    return text if kind in _SAY_IT_ALL else f"{text}, got {shown(problem['input'])}"


def _figure(fact: object) -> str:
    return f"{fact:g}" if isinstance(fact, float) else f"{fact}"


def shown(value: object) -> str:
    """A value from outside as JSON, cut to a readable length."""
    if isinstance(value, int) and abs(value) >= _LARGEST_SHOWN:
        return "an integer of more than 20 digits"
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= _GOT_LIMIT else text[:_GOT_LIMIT] + "..."


def unknown_key(
    name: str, known: Sequence[str], *, hint: Callable[[str], str] | None = None
) -> str:
    """Say that a key is not known, and which one may have been meant."""
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown key {name!r:.100}; {meant if hint is None else hint(name) or meant}"


def _refusal(error: ValidationError, model: type[BaseModel]) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    place = first["loc"]
    if first["type"] == "extra_forbidden":
        place, key = place[:-1], place[-1]
        text = unknown_key(str(key), tuple(model_at(model, place).model_fields))
    else:
        text = problem_text(first)
    return InvalidRequestError(text, field=".".join(map(str, place)) or None)


def model_at(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that holds the value at ``place`` of a model; the model itself for ``()``."""
    for part in place:
        field = model.model_fields.get(str(part))
        inner = () if field is None else (field.annotation, *get_args(field.annotation))
        for candidate in inner:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return model


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The same error with its field under the name that its reader knows it by.

    Args:
        names: leading part of the dotted name to what stands for it where the value came from.
    """
    head, dot, tail = (error.field or "").partition(".")
    if head not in names:
        return error
    text = str(error).removeprefix(f"{error.field}: ")
    return type(error)(text, field=f"{names[head]}{dot}{tail}")
