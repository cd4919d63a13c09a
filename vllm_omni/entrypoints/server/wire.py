"""Rules that every message on the wire shares: strict numbers, first failure, one error text."""

import json
import re
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from vllm_omni.errors import InvalidRequestError

_GOT_LIMIT = 80
_MESSAGES = {
    "missing": "is required",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "none_required": "must be absent or null",
}
_SUBJECT = re.compile(r"^(Input|String) should")


class Wire(BaseModel):
    """Base of all messages: frozen; fields that are not declared are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Message = TypeVar("Message", bound=Wire)


def refuse(message: str) -> PydanticCustomError:
    """The error to raise inside a validator."""
    return PydanticCustomError("refused", message)  # pyright: ignore[reportArgumentType]


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise refuse("must be a number, not a boolean")
    return value


def _integral(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse("must be an integer")
    if isinstance(value, float) and not value.is_integer():
        raise refuse("must be an integer without a fraction")
    return int(value)


NOT_BOOL = BeforeValidator(_not_bool)
"""Numbers may come as their digits in text, never as a boolean. Last of its annotations, so that
the bounds before it stay in the schema."""
Integral = Annotated[int, Field(ge=0, le=1_000_000), BeforeValidator(_integral)]
"""A count: an integer or integral float; text, booleans and fractions are refused."""
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), NOT_BOOL]
Positive = Annotated[int, Field(ge=1), NOT_BOOL]
NotNegative = Annotated[float, Field(ge=0), NOT_BOOL]


def not_blank(value: str | None) -> str | None:
    """Refuse text of white space only; ``None`` passes."""
    if value is not None and not value.strip():
        raise refuse("must not be blank")
    return value


def load_object(text: str, *, limit: int) -> dict[str, object]:
    """The JSON object in ``text``, which may have at most ``limit`` characters.

    Raises:
        InvalidRequestError: too long, not JSON (NaN and Infinity are not JSON), or no object.
    """
    if len(text) > limit:
        raise InvalidRequestError(
            f"the message has {len(text)} characters, at most {limit} are accepted"
        )
    try:
        loaded = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the message is not valid JSON: {error!s:.120}") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError(f"the message must be a JSON object, got {type(loaded).__name__}")
    return loaded


def validate(model: type[Message], raw: dict[str, object]) -> Message:
    """``raw`` as a message of ``model``.

    Raises:
        InvalidRequestError: names the first field that fails, in the order of declaration.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _invalid_request(error) from None


def _invalid_request(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    message = _MESSAGES.get(first["type"]) or _SUBJECT.sub("must", first["msg"])
    if first["type"] != "missing" and field is not None:
        message += f", got {_shortened(first['input'])}"
    return InvalidRequestError(message, field=field)


def _shortened(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _GOT_LIMIT else text[:_GOT_LIMIT] + "..."


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
