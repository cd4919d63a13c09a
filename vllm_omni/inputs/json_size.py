"""How much JSON a client may send: bounded by its text, before anything is made of it."""

from vllm_omni.errors import InvalidRequestError

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
