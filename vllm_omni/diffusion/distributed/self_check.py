"""Checks the exchange between ranks once, at start-up, with numbers whose places are known.

Libraries have been released whose exchange of more than two ranks returned zeros without an error.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.errors import ConfigError

_FRAMES = 2
_LOCAL_TOKENS = 3
_LOCAL_HEADS = 2
_HEAD_DIM = 4
_DISTINCT = 251
"""Prime, and small enough for every integer below it to be exact in bfloat16."""


def check_exchange(exchange: UlyssesExchange, *, dtype: torch.dtype, device: torch.device) -> None:
    """Exchange there and back; every rank of the group makes this call.

    Raises:
        ConfigError: if a number is not where it belongs.
    """
    group = exchange.group
    if group.size == 1:
        return
    tokens, heads = _LOCAL_TOKENS * group.size, _LOCAL_HEADS * group.size
    everything = _numbered(_FRAMES, tokens, heads, _HEAD_DIM).to(dtype)
    mine = exchange.local_tokens(everything).flatten(0, 1)
    parts = (mine.to(device), (mine + 1).to(device))
    exchanged = exchange.tokens_to_heads(*parts, latent_frames=_FRAMES)
    first = group.rank * _LOCAL_HEADS
    wanted = everything.flatten(0, 1)[:, first : first + _LOCAL_HEADS]
    back = exchange.heads_to_tokens(exchanged[0].contiguous(), latent_frames=_FRAMES)
    right = (
        torch.equal(exchanged[0].cpu(), wanted)
        and torch.equal(exchanged[1].cpu(), wanted + 1)
        and torch.equal(back.cpu(), mine)
    )
    if not right:
        raise ConfigError(
            f"the exchange between {group.size} ranks is wrong on {device}: tokens and heads did "
            "not come where they belong; use other versions of the device's libraries, or "
            "ulysses_degree 1"
        )


def _numbered(*shape: int) -> Float[Tensor, "..."]:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % _DISTINCT).float().reshape(shape)
