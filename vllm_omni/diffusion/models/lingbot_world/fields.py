"""Single values of a request: strict about kinds, clear about what was needed."""

import difflib
import math
import numbers
from collections.abc import Collection, Mapping

import numpy as np

from vllm_omni.errors import InvalidRequestError


def integer(value: object, field: str) -> int:
    """An integer; ``True`` is none, and neither are "21" and 21.0.

    Raises:
        InvalidRequestError: for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(f"must be an integer, got {shown(value)}", field=field)
    return int(value)


def positive_number(value: object, field: str, *, limit: float) -> float:
    """A finite number above 0 and at most ``limit``.

    Raises:
        InvalidRequestError: for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidRequestError(f"must be a number, got {shown(value)}", field=field)
    # Compared before it is converted: an integer may be too large for a float.
    if not 0 < value <= limit or not math.isfinite(value):
        raise InvalidRequestError(
            f"must be above 0 and at most {limit:g}, got {shown(value)}", field=field
        )
    return float(value)


def mapping(value: object, field: str, known: Collection[str]) -> Mapping[str, object]:
    """A mapping with no other keys than the known ones.

    Raises:
        InvalidRequestError: with the nearest known key, where one is near.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"must be a mapping, got {type(value).__name__}", field=field)
    for key in value:
        if key not in known:
            raise InvalidRequestError(
                f"unknown key {shown(key)}; {_suggestion(key, known)}", field=field
            )
    return value


def shown(value: object) -> str:
    """A value of a client for an error text, cut to a readable length."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        # The decimal digits of very large integers are refused by Python itself.
        return f"{value}" if abs(int(value)) < 10**20 else "an integer of more than 20 digits"
    return f"{value!r:.100}"


def _suggestion(key: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1) if isinstance(key, str) else []
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
