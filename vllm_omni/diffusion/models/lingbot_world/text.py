"""Prompt to text condition: tokenizer, UMT5 encoder and a small cache."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from vllm_omni.diffusion.distributed.parallel_state import RankGroup, is_root
from vllm_omni.diffusion.models.loader import module_bytes, telling
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
        encoder: in the model's dtype, on the device or on the host.
        device: where the results are wanted; ``None`` for where the encoder is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encoder: UMT5EncoderModel,
        device: torch.device | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.device = device or encoder.device
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    def move(self, device: torch.device) -> None:
        """Let the encoder work on another device."""
        nn.Module.to(self.encoder, device)  # the library annotates its own for other uses

    @classmethod
    def load(cls, model: Path, *, dtype: torch.dtype, device: torch.device) -> "TextEncoder":
        """Read the ``tokenizer`` and ``text_encoder`` folders of a checkpoint into host memory.

        Args:
            device: where the results are wanted.

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
        with _loading("text_encoder"), telling():
            loaded: Any = UMT5EncoderModel.from_pretrained(
                model / "text_encoder", dtype=dtype, local_files_only=True, output_loading_info=True
            )
        encoder, info = loaded
        problems = {kind: names for kind, names in info.items() if names}
        if problems:
            raise CheckpointError(f"text_encoder weights do not fit: {problems}")
        return cls(tokenizer, encoder.eval().requires_grad_(requires_grad=False), device)

    def embed(self, prompt: str) -> Float[Tensor, "text_tokens text_dim"]:
        """Embed one prompt; rows of padding tokens are exactly zero.

        A prompt of more than 512 tokens is cut, with a notice in the log.
        """
        return _kept(self._cache, prompt, self._encode)

    def tokenize(
        self, prompt: str
    ) -> tuple[Int64[Tensor, "1 text_tokens"], Int64[Tensor, "1 text_tokens"]]:
        """Return token ids and mask of a prompt, padded on the right, or cut and logged.

        Of a long prompt only as much is read as its first tokens need: this runs between the
        chunks of others, and takes milliseconds for the longest prompt that the server takes.
        """
        rows = self._first_rows(prompt)
        if len(rows["input_ids"]) > 1:
            logger.warning("a prompt was cut to %d tokens", TEXT_TOKENS)
        return rows["input_ids"][:1], rows["attention_mask"][:1]

    def _first_rows(self, prompt: str) -> BatchEncoding:
        """Tokenize a prompt as far as its first row needs."""
        for head, needed in _heads(prompt):
            rows = self._rows(head)
            if len(rows["input_ids"]) >= needed:
                return rows
        return self._rows(prompt)

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
        return (hidden * mask[0].unsqueeze(-1).to(hidden.dtype)).to(self.device)


class Prompts:
    """The embedded prompts of all ranks, of which the root alone holds the encoder.

    Args:
        encoder: on the root; ``None`` on every other rank.
        ranks: all ranks, for host tensors.
        text_dim: channels of an embedded prompt.
    """

    def __init__(
        self,
        encoder: TextEncoder | None,
        ranks: RankGroup,
        *,
        text_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.encoder = encoder
        self._ranks = ranks
        self._shape = (TEXT_TOKENS, text_dim)
        self._dtype, self._device = dtype, device
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Size of the encoder's weights on this rank."""
        return 0 if self.encoder is None else module_bytes(self.encoder.encoder)

    def is_on(self, device: torch.device) -> bool:
        """Tell whether this rank has an encoder that works on the device."""
        return self.encoder is not None and self.encoder.encoder.device == device

    def prepare(self, prompt: str) -> None:
        """Embed a prompt on the root for a later :meth:`embed`; waits for no other rank."""
        if self.encoder is not None:
            self.encoder.embed(prompt)

    def embed(self, prompt: str) -> Float[Tensor, "text_tokens text_dim"]:
        """Embed one prompt. All ranks call this alike; those without the encoder wait for it."""
        if self._ranks.size == 1:
            assert self.encoder is not None, "a rank that is alone is the root"
            return self.encoder.embed(prompt)
        return _kept(self._cache, prompt, self._shared)

    def _shared(self, prompt: str) -> Float[Tensor, "text_tokens text_dim"]:
        if self.encoder is None:
            host = torch.empty(self._shape, dtype=self._dtype)
        else:
            host = self.encoder.embed(prompt).cpu().contiguous()
        self._ranks.broadcast(host.view(torch.uint8))
        return host.to(self._device)


def _kept(
    cache: OrderedDict[str, Tensor], prompt: str, embed: Callable[[str], Tensor]
) -> Float[Tensor, "text_tokens text_dim"]:
    """Return the embedding of a prompt from a cache of the last few, which gets it if need be."""
    if prompt not in cache:
        cache[prompt] = embed(prompt)
        if len(cache) > _CACHED_PROMPTS:
            cache.popitem(last=False)
    cache.move_to_end(prompt)
    return cache[prompt]


def _heads(prompt: str) -> Iterator[tuple[str, int]]:
    """Yield ever longer beginnings of a prompt.

    The tokenizer looks at each word alone, so that what follows a word changes none of its tokens.
    What follows inside a long word, as in a script without spaces, changes those before the cut:
    there a whole row lies between it and the tokens that count.

    Yields:
        The beginning, and how many rows of tokens it must make for the first to be that of all.
    """
    length = _FIRST_HEAD_CHARS
    while length < len(prompt):
        end = prompt.rfind(" ", length // 2, length)
        yield (prompt[:end], 2) if end > 0 else (prompt[:length], 3)
        length *= 4


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
