"""How input becomes checked values: one way to parse, and the bounds of every value. No torch.

Every way in (WebSocket, HTTP, Python, deploy files) parses with :func:`validate`, so that the same
mistake gets the same words everywhere. Numbers are strict: ``True`` is none, and text is one only
where a message may write its numbers as text. Numbers of numpy are numbers.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from vllm_omni.diffusion.geometry import pixel_frames_of
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


# ------------------------------------------------------------------ the bounds of a request

MAX_SIDE = 4096
"""Largest height or width in pixels."""
MAX_CHUNKS = 1_000_000
"""Nine days at 16 frames per second; for longer there are unbounded sessions."""
MAX_FPS = 1000
MAX_FLOW_SHIFT = 1000
MAX_PROMPT_CHARS = 32_768
"""Characters of a prompt. A model reads 512 tokens at most; more only costs time to cut."""
MAX_SHORT_CHARS = 4096
"""Characters of any other text but the URL of a picture; the longest path of a system."""
SEED_BITS = 53
"""Bits of a seed that is drawn: every client can repeat it, also one whose numbers are doubles."""

_DIGITS = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")


@runtime_checkable
class Parsing(Protocol):
    """The part of pydantic's ``ValidationInfo`` that is read here; that one cannot be checked."""

    @property
    def context(self) -> object:
        """What the caller of the validation gave along."""
        ...


def _number(value: object, info: Parsing) -> object:
    if isinstance(value, np.number):
        return value.item()
    if isinstance(value, str) and info.context == WRITTEN and (match := _DIGITS.fullmatch(value)):
        return float(value) if match.lastindex else int(value)
    return value


def _integer(value: object, info: Parsing) -> object:
    number = _number(value, info)
    if isinstance(number, float) and number.is_integer() and info.context == WRITTEN:
        return int(number)
    return number


def _count(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER = BeforeValidator(_integer)
"""Last of the annotations of an integer, so that the bounds before it stay in the schema."""
NUMBER = BeforeValidator(_number)
"""The same for a number that may have a fraction."""


def normalise_prompt(text: str) -> str:
    """Make every run of white space one space; nothing may be left of no prompt."""
    words = " ".join(text.split())
    if not words:
        raise ValueError("must not be blank")
    return words


def draw_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(SEED_BITS)


def told_seed(seed: int) -> int | str:
    """A seed as JSON that any client reads without loss: as text beyond what a double holds."""
    return seed if abs(seed) <= 2**SEED_BITS else f"{seed}"


Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1), INTEGER]
Fps = Annotated[float, Field(strict=True, ge=1, le=MAX_FPS), NUMBER]
"""Playback rate in pixel frames per second, and time base of interactions."""
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE), INTEGER]
"""Height or width in pixels; that it is a multiple of 16 is checked with the whole size."""
Frames = Annotated[int, Field(strict=True, ge=1, le=pixel_frames_of(MAX_CHUNKS)), INTEGER]
"""Pixel frames of a rollout; that they are 9 + 12k is checked with the whole request."""
FlowShift = Annotated[float, Field(strict=True, gt=0, le=MAX_FLOW_SHIFT), NUMBER]
Steps = Annotated[int, Field(strict=True, ge=1, le=200), INTEGER]
"""Denoising steps; a model accepts one number of them."""
Outputs = Annotated[int, Field(strict=True, ge=1, le=10), INTEGER]
"""Videos per prompt; a model accepts 1."""
Guidance = Annotated[float, Field(strict=True, ge=0, le=20), NUMBER]
"""A guidance scale, which has no effect on a distilled model."""
Share = Annotated[float, Field(strict=True, ge=0, le=1), NUMBER]
PositiveInt = Annotated[int, Field(strict=True, ge=1), INTEGER]
NotNegative = Annotated[float, Field(strict=True, ge=0), NUMBER]
Count = Annotated[int, Field(strict=True, ge=0, le=1_000_000), BeforeValidator(_count)]
"""Chunks of a transition: an integer, or a whole number with a point; never text."""
Text = Annotated[str, Field(min_length=1)]
PromptText = Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
"""A prompt as it was written."""
ShortText = Annotated[str, Field(max_length=MAX_SHORT_CHARS)]
"""Text that is no prompt: a name, a size, a path."""
Prompt = Annotated[PromptText, AfterValidator(normalise_prompt)]
"""A prompt that is not blank, with every run of white space made one space."""
OutputType = Literal["pil", "np", "latent"]
Quality = Literal["lossless", "high"]
