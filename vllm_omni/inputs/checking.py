"""How input becomes a checked model: one base class and one way to parse it, without torch.

Every way in (WebSocket, HTTP, Python, deploy files) parses with :func:`validate`, so that the same
mistake gets the same words everywhere.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_omni.errors import InvalidRequestError
from vllm_omni.wording import problems

WRITTEN = "written"
"""Validation context in which numbers may stand as text; see :func:`validate`."""


class Checked(BaseModel):
    """Base of all models of input: frozen, strict about kinds, without NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Message(Checked):
    """Base of messages: fields that are not declared are ignored, so that clients may be newer."""

    model_config = ConfigDict(extra="ignore", strict=False)


Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model], raw: Mapping[str, object], *, written: bool = False, within: str = ""
) -> Model:
    """Parse a mapping from outside.

    Args:
        within: name of the field that holds the mapping.
        written: whether numbers may stand as their digits in text, as they do in forms, and whole
            numbers with a point, as they do in JavaScript.

    Raises:
        InvalidRequestError: naming the first field that is wrong, in the order of declaration.
    """
    require_text(raw, within)
    try:
        return model.model_validate(dict(raw), context=WRITTEN if written else None)
    except ValidationError as error:
        raise _refusal(error, model, within) from None


def require_text(raw: object, within: str = "") -> None:
    """Refuse text that UTF-8 cannot hold, anywhere in a structure, keys included.

    JSON can spell half of a surrogate pair (``"\\ud83d"``, an emoji that was cut in two). No
    answer, log or file could repeat such a text.
    """
    waiting: list[tuple[tuple[object, ...], object]] = [((within,), raw)]
    looked_into: set[int] = set()  # What Python or YAML built may hold itself.
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            _require_encodable(value, path)
        elif id(value) in looked_into:
            continue
        elif isinstance(value, dict | Mapping):
            looked_into.add(id(value))
            waiting.extend((path, key) for key in value)
            waiting.extend(((*path, key), item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            looked_into.add(id(value))
            waiting.extend((path, item) for item in value if type(item) not in _WITHOUT_TEXT)


_WITHOUT_TEXT = {int, float, bool, type(None)}


def _require_encodable(text: str, path: tuple[object, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        field = _dotted(*(f"{name!s:.100}" for name in path))
        raise InvalidRequestError(
            "holds half of a surrogate pair, which is no character; send whole ones",
            field=field.encode("utf-8", "backslashreplace").decode("utf-8") or None,
        ) from None


def unknown_key(name: str, known: Sequence[str]) -> str:
    """Say that a key is not known, and which one may have been meant."""
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown key {name!r:.100}; {meant}"


def _refusal(error: ValidationError, model: type[BaseModel], within: str) -> InvalidRequestError:
    first = problems(error)[0]
    if first.kind not in {"extra_forbidden", "invalid_key"}:
        return InvalidRequestError(first.text, field=_dotted(within, first.name) or None)
    *place, key = first.path
    text = unknown_key(key, tuple(model_at(model, place).model_fields))
    return InvalidRequestError(text, field=_dotted(within, *place) or None)


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)


def model_at(model: type[BaseModel], place: Sequence[str]) -> type[BaseModel]:
    """The model that holds the value at ``place`` of a model; the model itself for ``()``."""
    for part in place:
        field = model.model_fields.get(part)
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


MAX_JSON_VALUES = 100_000
"""Brackets and commas of one text. Each may stand for a value, and each value costs some hundred
bytes and a microsecond, many times those of the text. A script needs eight for each chunk."""
_SLICE_CHARS = 2**20


def require_few_values(
    text: str, *, limit: int = MAX_JSON_VALUES, field: str | None = None
) -> None:
    """Refuse a JSON text that holds very many values.

    What stands inside strings counts as well: telling the two apart would cost as much as parsing.

    Raises:
        InvalidRequestError: naming the field, where one is given, and the limit.
    """
    found = 0
    for start in range(0, len(text), _SLICE_CHARS):
        found += sum(text.count(mark, start, start + _SLICE_CHARS) for mark in "[{,")
        if found > limit:
            raise InvalidRequestError(
                f"the JSON has more than {limit} values (brackets and commas); send fewer",
                field=field,
            )
