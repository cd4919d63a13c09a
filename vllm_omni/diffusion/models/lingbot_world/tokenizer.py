"""Prompts to token ids, in the process that takes requests; no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Encoding, Tokenizer

from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.diffusion.models.checkpoint_files import label, read_json
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

TEXT_TOKENS: Final = 512
"""Every prompt is cut to this length, the end token included."""
_STRANGE = "a \u2603 \U000f0000"
"""Characters that hardly a vocabulary knows, the last of them none of Unicode's own."""
_FIRST_HEAD_CHARS = 8 * TEXT_TOKENS
"""Of a long prompt; English has some five characters to a token."""


class PromptTokenizer:
    """Reads prompts as the text encoder takes them. Any thread may call it.

    Args:
        library: cuts at ``TEXT_TOKENS`` and does not pad.
    """

    def __init__(self, library: Tokenizer) -> None:
        self._library = library

    def __call__(self, text: str) -> TokenizedPrompt:
        """Return the first 512 tokens of a prompt, and say in the log if there are more.

        Of a long prompt only as much is read as its first tokens need: milliseconds for the
        longest that the server takes.
        """
        row = self._first_row(text)
        if row.overflowing:
            logger.warning("a prompt was cut to %d tokens", TEXT_TOKENS)
        return TokenizedPrompt(text, tuple(row.ids))

    def _first_row(self, text: str) -> Encoding:
        """Tokenize a text as far as its first row needs; what does not fit makes further rows."""
        for head, rows_needed in _heads(text):
            row = self._library.encode(head)
            if 1 + len(row.overflowing) >= rows_needed:
                return row
        return self._library.encode(text)


def load_tokenizer(model: Path) -> PromptTokenizer:
    """Read ``tokenizer/tokenizer.json`` of a checkpoint.

    Raises:
        CheckpointError: if there is none, or it cannot be used.
    """
    file = model / "tokenizer" / "tokenizer.json"
    read_json(file)
    try:
        library = Tokenizer.from_file(str(file))
        library.encode(_STRANGE)  # a vocabulary may have no word for what it does not know
    except Exception as error:
        if type(error) is Exception:  # the library knows no class of errors of its own
            raise CheckpointError(f"{label(file)} cannot be used: {error}") from error
        raise
    library.no_padding()
    library.enable_truncation(TEXT_TOKENS)
    return PromptTokenizer(library)


def _heads(text: str) -> Iterator[tuple[str, int]]:
    """Yield ever longer beginnings of a prompt.

    The tokenizer looks at each word alone, so that what follows a word changes none of its tokens.
    What follows inside a long word, as in a script without spaces, changes those before the cut:
    there a whole row lies between it and the tokens that count.

    Yields:
        The beginning, and how many rows of tokens it must make for the first to be that of all.
    """
    length = _FIRST_HEAD_CHARS
    while length < len(text):
        end = text.rfind(" ", length // 2, length)
        yield (text[:end], 2) if end > 0 else (text[:length], 3)
        length *= 4
