"""The bounds of every value of a request, the same for every way in. No torch.

Numbers are strict: ``True`` is none, and text is one only where a message may write its numbers as
text (see :func:`vllm_omni.inputs.checking.validate`). Numbers of numpy are numbers.
"""

import re
import secrets
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from vllm_omni.diffusion.geometry import pixel_frames_of
from vllm_omni.inputs.checking import WRITTEN

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
