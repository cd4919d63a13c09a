"""Prompt to text condition: tokenizer, UMT5 encoder and a small cache."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from vllm_omni.diffusion.distributed.parallel_state import is_root
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

TEXT_TOKENS = 512
"""Every prompt is padded or cut to this length."""
_CACHED_PROMPTS = 4
_FIRST_HEAD_CHARS = 8 * TEXT_TOKENS
"""Of a long prompt; English has some five characters to a token."""


class TextEncoder:
    """Embeds prompts and keeps the last few results.

    Args:
        tokenizer: pads on the right.
        encoder: on its device and in the model's dtype.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: UMT5EncoderModel) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    @classmethod
    def load(cls, model: Path, *, dtype: torch.dtype, device: torch.device) -> "TextEncoder":
        """Read the ``tokenizer`` and ``text_encoder`` folders of a checkpoint.

        Raises:
            CheckpointError: if a folder is missing or tensors do not match.
        """
        for folder in ("tokenizer", "text_encoder"):
            if not (model / folder).is_dir():
                raise CheckpointError(f"the checkpoint has no {folder} folder")
        transformers_logging.disable_progress_bar()
        with _loading("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer", local_files_only=True)
        if is_root():
            logger.info("loading text_encoder")
        with _loading("text_encoder"):
            loaded: Any = UMT5EncoderModel.from_pretrained(
                model / "text_encoder", dtype=dtype, local_files_only=True, output_loading_info=True
            )
        encoder, info = loaded
        problems = {kind: names for kind, names in info.items() if names}
        if problems:
            raise CheckpointError(f"text_encoder weights do not fit: {problems}")
        return cls(tokenizer, encoder.eval().requires_grad_(requires_grad=False).to(device))

    def embed(self, prompt: str) -> Float[Tensor, "text_tokens text_dim"]:
        """Embed one prompt; rows of padding tokens are exactly zero.

        A prompt of more than 512 tokens is cut, with a notice in the log.
        """
        if prompt in self._cache:
            self._cache.move_to_end(prompt)
            return self._cache[prompt]
        embedded = self._encode(prompt)
        self._cache[prompt] = embedded
        if len(self._cache) > _CACHED_PROMPTS:
            self._cache.popitem(last=False)
        return embedded

    def tokenize(
        self, prompt: str
    ) -> tuple[Int64[Tensor, "1 text_tokens"], Int64[Tensor, "1 text_tokens"]]:
        """Return token ids and mask of a prompt, padded on the right, or cut and logged.

        A long prompt is read up to the end of a word only, as far as its first tokens need: the
        tokenizer looks at each word alone, so that the rest of the text changes none of them.
        """
        heads = _heads(prompt)
        rows = self._rows(next(heads))
        for head in heads:
            if len(rows["input_ids"]) > 1:
                break
            rows = self._rows(head)
        if len(rows["input_ids"]) > 1:
            logger.warning("a prompt was cut to %d tokens", TEXT_TOKENS)
        return rows["input_ids"][:1], rows["attention_mask"][:1]

    def _rows(self, text: str) -> BatchEncoding:
        """Tokenize a text; what is too long for one row makes more."""
        return self.tokenizer(
            [text],
            padding="max_length",
            padding_side="right",
            max_length=TEXT_TOKENS,
            truncation=True,
            return_overflowing_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )

    def _encode(self, prompt: str) -> Float[Tensor, "text_tokens text_dim"]:
        ids, mask = (part.to(self.encoder.device) for part in self.tokenize(prompt))
        hidden = self.encoder(ids, attention_mask=mask).last_hidden_state[0]
        return hidden * mask[0].unsqueeze(-1).to(hidden.dtype)


def _heads(prompt: str) -> Iterator[str]:
    """Yield ever longer beginnings of a prompt that end with a word; the last is all of it."""
    length = _FIRST_HEAD_CHARS
    while length < len(prompt):
        end = prompt.rfind(" ", 0, length)
        if end > 0:
            yield prompt[:end]
        length *= 4
    yield prompt


@contextmanager
def _loading(folder: str) -> Iterator[None]:
    """Report what transformers says of a folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"the {folder} folder of the checkpoint cannot be loaded: {type(error).__name__}: "
            f"{detail:.500}"
        ) from error
    except Exception as error:
        # The tokenizers know no class of errors of their own.
        error.add_note(f"in the {folder} folder of the checkpoint")
        raise
