"""Tokens to text condition: UMT5 encoder and a small cache."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from vllm_omni.diffusion.distributed.parallel_state import RankGroup, is_root
from vllm_omni.diffusion.models.lingbot_world.tokenizer import TEXT_TOKENS
from vllm_omni.diffusion.models.loader import module_bytes, telling
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

TokenIds = tuple[int, ...]
"""Of one prompt, at most 512, without padding."""
_CACHED_PROMPTS = 4


class TextEncoder:
    """Embeds prompts and keeps the last few results.

    Args:
        encoder: in the model's dtype, on the device or on the host.
        device: where the results are wanted; ``None`` for where the encoder is.
    """

    def __init__(self, encoder: UMT5EncoderModel, device: torch.device | None = None) -> None:
        self.encoder = encoder
        self.device = device or encoder.device
        self._cache: OrderedDict[TokenIds, Tensor] = OrderedDict()

    def move(self, device: torch.device) -> None:
        """Let the encoder work on another device."""
        nn.Module.to(self.encoder, device)  # the library annotates its own for other uses

    @classmethod
    def load(cls, model: Path, *, dtype: torch.dtype, device: torch.device) -> "TextEncoder":
        """Read the ``text_encoder`` folder of a checkpoint into host memory.

        Args:
            device: where the results are wanted.

        Raises:
            CheckpointError: if the folder is missing or tensors do not match.
        """
        if not (model / "text_encoder").is_dir():
            raise CheckpointError("the checkpoint has no text_encoder folder")
        transformers_logging.disable_progress_bar()
        if is_root():
            logger.info("loading text_encoder")
        try:
            with telling():
                loaded: Any = UMT5EncoderModel.from_pretrained(
                    model / "text_encoder",
                    dtype=dtype,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            detail = " ".join(str(error).split())
            raise CheckpointError(
                "the text_encoder folder of the checkpoint cannot be loaded: "
                f"{type(error).__name__}: {detail:.500}"
            ) from error
        encoder, info = loaded
        problems = {kind: names for kind, names in info.items() if names}
        if problems:
            raise CheckpointError(f"text_encoder weights do not fit: {problems}")
        return cls(encoder.eval().requires_grad_(requires_grad=False), device)

    def embed(self, tokens: TokenIds) -> Float[Tensor, "text_tokens text_dim"]:
        """Embed one prompt; rows past its tokens are exactly zero."""
        return _kept(self._cache, tokens, self._encode)

    def _encode(self, tokens: TokenIds) -> Float[Tensor, "text_tokens text_dim"]:
        ids, mask = (part.to(self.encoder.device) for part in padded(tokens))
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
        self._cache: OrderedDict[TokenIds, Tensor] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Size of the encoder's weights on this rank."""
        return 0 if self.encoder is None else module_bytes(self.encoder.encoder)

    def is_on(self, device: torch.device) -> bool:
        """Tell whether this rank has an encoder that works on the device."""
        return self.encoder is not None and self.encoder.encoder.device == device

    def prepare(self, tokens: TokenIds) -> None:
        """Embed a prompt on the root for a later :meth:`embed`; waits for no other rank."""
        if self.encoder is not None:
            self.encoder.embed(tokens)

    def embed(self, tokens: TokenIds) -> Float[Tensor, "text_tokens text_dim"]:
        """Embed one prompt. All ranks call this alike; those without the encoder wait for it."""
        if self._ranks.size == 1:
            assert self.encoder is not None, "a rank that is alone is the root"
            return self.encoder.embed(tokens)
        return _kept(self._cache, tokens, self._shared)

    def _shared(self, tokens: TokenIds) -> Float[Tensor, "text_tokens text_dim"]:
        if self.encoder is None:
            host = torch.empty(self._shape, dtype=self._dtype)
        else:
            host = self.encoder.embed(tokens).cpu().contiguous()
        self._ranks.broadcast(host.view(torch.uint8))
        return host.to(self._device)


def padded(
    tokens: TokenIds,
) -> tuple[Int64[Tensor, "1 text_tokens"], Int64[Tensor, "1 text_tokens"]]:
    """Make the encoder's input: the tokens with zeros behind them, and which of all count."""
    ids = torch.zeros((1, TEXT_TOKENS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[0, : len(tokens)] = torch.tensor(tokens)
    mask[0, : len(tokens)] = 1
    return ids, mask


def _kept(
    cache: OrderedDict[TokenIds, Tensor], tokens: TokenIds, embed: Callable[[TokenIds], Tensor]
) -> Float[Tensor, "text_tokens text_dim"]:
    """Return the embedding of a prompt from a cache of the last few, which gets it if need be.

    A cached method would hold its object, and with it gigabytes, until cycles are collected.
    """
    if tokens not in cache:
        cache[tokens] = embed(tokens)
        if len(cache) > _CACHED_PROMPTS:
            cache.popitem(last=False)
    cache.move_to_end(tokens)
    return cache[tokens]
