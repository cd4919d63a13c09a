"""One dialect for everything that pydantic refuses: settings, messages and requests.

Pydantic says "Input should be greater than or equal to 1"; every door of this package says "must be
at least 1, got 0". A validator that knows more than pydantic raises :func:`refuse`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

_SHOWN_CHARACTERS = 80
_REQUIREMENTS = {
    "missing": "is required",
    "extra_forbidden": "is unknown",
    "none_required": "must be absent or null",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer without a fraction",
    "int_parsing_size": "must be an integer of fewer digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be text that UTF-8 can encode",
    "string_pattern_mismatch": "has the wrong form",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
"""Pydantic's type of an error -> what a value must be; ``{}`` holds the numbers of the error."""
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|Value|List|Dictionary) should")
_REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with some input.

    Attributes:
        path: names and list positions that lead to the value, outermost first; empty for the whole.
        requirement: what the value must be, for example ``"must be at least 1"``.
        value: what was given; of no use where the value is missing.
        kind: pydantic's type of the error.
    """

    path: tuple[str, ...]
    requirement: str
    value: object
    kind: str

    @property
    def name(self) -> str:
        """The path with dots, ``""`` for the whole."""
        return ".".join(self.path)

    @property
    def text(self) -> str:
        """What was needed and what was got, without the name."""
        whole_input = not self.path and isinstance(self.value, Mapping)
        if (whole_input and self.kind == _REFUSED) or self.kind in {
            "missing",
            "extra_forbidden",
            "value_error",
        }:
            return self.requirement
        return f"{self.requirement}, got {shown(self.value)}"


def refuse(requirement: str) -> PydanticCustomError:
    """The error to raise inside a validator; what was got is added to its text."""
    return PydanticCustomError(_REFUSED, requirement)  # pyright: ignore[reportArgumentType]


def problems(error: ValidationError) -> list[Problem]:
    """Everything that a failed validation found, in the order of declaration."""
    return [problem(details) for details in error.errors(include_url=False)]


def problem(details: ErrorDetails) -> Problem:
    """One of the errors that pydantic lists, in our words."""
    path = tuple(str(part) for part in details["loc"])
    return Problem(path, _requirement(details), details["input"], details["type"])


def shown(value: object) -> str:
    """A value as a message shows it: as JSON, shortened where it is long."""
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):  # odd keys, thousands of digits, a circle
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def one_of(names: Iterable[object]) -> str:
    """Join words to ``a, b or c``."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def _requirement(details: ErrorDetails) -> str:
    kind, message = details["type"], details["msg"]
    if kind == "value_error":  # a ValueError of a validator: the sentence is complete
        return message.removeprefix("Value error, ")
    context = {key: _plain(value) for key, value in details.get("ctx", {}).items()}
    if kind in {"string_too_short", "too_short"} and context["min_length"] == 1:
        return "must not be empty"
    if kind in _REQUIREMENTS:
        return _REQUIREMENTS[kind].format(**context)
    return _PYDANTIC_SUBJECT.sub("must", message)


def _plain(value: object) -> object:
    """A bound as it was written: ``1`` for ``1.0``, names without quotes."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.replace("'", "") if isinstance(value, str) else value
