"""Exchanges between the ranks that share the tokens of each latent frame (Ulysses).

Rank r holds tokens ``[r * P / n, (r + 1) * P / n)`` of *every* frame, P being the tokens of a
frame. Attention needs all tokens of some heads instead of some tokens of all heads, so queries,
keys and values are exchanged in one message per layer and the result in another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.distributed.parallel_state import RankGroup

# Newer releases of torch have another name for the same call.
_all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)


class UlyssesExchange:
    """The exchanges of one rank; a rank that is alone hands its tensors back.

    Send and receive buffers are allocated once per shape and reused.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._buffers: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def local_tokens(
        self, x: Float[Tensor, "frames tokens *rest"]
    ) -> Float[Tensor, "frames local_tokens *rest"]:
        """This rank's tokens of every frame."""
        share = x.shape[1] // self.group.size
        return x[:, self.group.rank * share : (self.group.rank + 1) * share]

    def tokens_to_heads(
        self, *parts: Float[Tensor, "local_tokens heads head_dim"], latent_frames: int
    ) -> tuple[Float[Tensor, "tokens local_heads head_dim"], ...]:
        """Give up tokens, get all tokens of this rank's heads, in (frame, token) order.

        All parts travel in one message.
        """
        n = self.group.size
        if n == 1:
            return parts
        # [frames, local, heads, dim] x parts -> [n, frames, local, parts, heads / n, dim]
        packed = torch.stack([p.unflatten(0, (latent_frames, -1)) for p in parts], dim=2)
        split = packed.unflatten(3, (n, -1)).permute(3, 0, 1, 2, 4, 5)
        received = self._all_to_all("heads", split)
        # [n, frames, local, parts, heads / n, dim] -> [parts, frames, n, local, heads / n, dim]
        ordered = received.permute(3, 1, 0, 2, 4, 5).reshape(
            len(parts), -1, split.shape[4], split.shape[5]
        )
        return tuple(ordered.unbind(0))

    def heads_to_tokens(
        self, x: Float[Tensor, "tokens local_heads head_dim"], *, latent_frames: int
    ) -> Float[Tensor, "local_tokens heads head_dim"]:
        """Undo :meth:`tokens_to_heads` for the attention output."""
        n = self.group.size
        if n == 1:
            return x
        # [frames, n, local, heads / n, dim] -> [n, frames, local, heads / n, dim]
        split = x.unflatten(0, (latent_frames, n, -1)).permute(1, 0, 2, 3, 4)
        received = self._all_to_all("tokens", split)
        return received.permute(1, 2, 0, 3, 4).reshape(-1, n * split.shape[3], split.shape[4])

    def gather_tokens(
        self, x: Float[Tensor, "frames local_tokens channels"]
    ) -> Float[Tensor, "frames tokens channels"]:
        """All tokens of every frame, on every rank."""
        n = self.group.size
        if n == 1:
            return x
        gathered = self._buffer("gather", x.dtype, (n, *x.shape), x.device)
        _all_gather(gathered.flatten(0, 1), x.contiguous(), group=self.group.group)
        return gathered.transpose(0, 1).flatten(1, 2)

    def _all_to_all(self, use: str, split: Tensor) -> Tensor:
        shape = tuple(split.shape)
        send = self._buffer(use + " send", split.dtype, shape, split.device)
        receive = self._buffer(use + " receive", split.dtype, shape, split.device)
        send.copy_(split)
        dist.all_to_all_single(receive, send, group=self.group.group)
        return receive

    def _buffer(
        self, use: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        key = (use, dtype, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._buffers[key]
