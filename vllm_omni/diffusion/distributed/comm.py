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
from vllm_omni.diffusion.distributed.traffic import ExchangeTraffic, TrafficKind

_MOST_BUFFERS = 32
"""Those of four sizes of video and more: a server may meet ever new ones."""


class UlyssesExchange:
    """The exchanges of one rank; a rank that is alone hands its tensors back.

    Send and receive buffers are allocated once per shape and reused, the oldest given up for a
    new shape where there are many; results are memory of their own.

    Attributes:
        traffic: what was exchanged so far.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.traffic = ExchangeTraffic()
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
        local_tokens, heads, head_dim = parts[0].shape
        shape = (n, latent_frames, local_tokens // latent_frames, len(parts), heads // n, head_dim)
        send = self._buffer("heads send", parts[0], shape)
        for index, part in enumerate(parts):
            # [frames, local, n, heads / n, dim] -> [n, frames, local, heads / n, dim]
            split = part.unflatten(0, (latent_frames, -1)).unflatten(2, (n, -1))
            send[:, :, :, index].copy_(split.permute(2, 0, 1, 3, 4))
        received = self._buffer("heads receive", parts[0], shape)
        self._all_to_all(received, send, self.traffic.heads)
        # [n, frames, local, parts, heads / n, dim] -> [parts, frames, n, local, heads / n, dim]
        ordered = received.permute(3, 1, 0, 2, 4, 5).reshape(len(parts), -1, heads // n, head_dim)
        return tuple(ordered.unbind(0))

    def heads_to_tokens(
        self, x: Float[Tensor, "tokens local_heads head_dim"], *, latent_frames: int
    ) -> Float[Tensor, "local_tokens heads head_dim"]:
        """Undo :meth:`tokens_to_heads` for the attention output."""
        if self.group.size == 1:
            return x
        ordered = self._exchanged_tokens(x, latent_frames)
        return ordered.reshape(-1, x.shape[1] * self.group.size, x.shape[2])

    def heads_to_tokens_into(
        self,
        x: Float[Tensor, "tokens local_heads head_dim"],
        target: Float[Tensor, "local_tokens heads head_dim"],
        *,
        latent_frames: int,
    ) -> None:
        """Like :meth:`heads_to_tokens`, into memory that somebody else owns.

        Raises:
            ValueError: if ``target`` does not fit; nothing was exchanged.
        """
        n = self.group.size
        tokens, heads, head_dim = x.shape
        if tokens % (latent_frames * n):
            raise ValueError(f"{tokens} tokens are not {latent_frames} frames shared by {n} ranks")
        wanted = (tokens // n, heads * n, head_dim)
        if (tuple(target.shape), target.dtype, target.device) != (wanted, x.dtype, x.device):
            raise ValueError(
                f"the target must be {wanted} of {x.dtype} on {x.device}, got "
                f"{tuple(target.shape)} of {target.dtype} on {target.device}"
            )
        if not target.is_contiguous():
            raise ValueError(f"the target must be contiguous, got strides {target.stride()}")
        if target.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise ValueError("the target shares memory with the input")
        ordered = x if n == 1 else self._exchanged_tokens(x, latent_frames)
        target.view(ordered.shape).copy_(ordered)

    def _exchanged_tokens(
        self, x: Float[Tensor, "tokens local_heads head_dim"], latent_frames: int
    ) -> Float[Tensor, "frames local_tokens ranks local_heads head_dim"]:
        """A view of the receive buffer in the order of tokens and heads."""
        # [frames, n, local, heads / n, dim] -> [n, frames, local, heads / n, dim]
        split = x.unflatten(0, (latent_frames, self.group.size, -1)).permute(1, 0, 2, 3, 4)
        send = self._buffer("tokens send", x, tuple(split.shape))
        send.copy_(split)
        received = self._buffer("tokens receive", x, tuple(split.shape))
        self._all_to_all(received, send, self.traffic.tokens)
        return received.permute(1, 2, 0, 3, 4)

    def gather_tokens(
        self, x: Float[Tensor, "frames local_tokens channels"]
    ) -> Float[Tensor, "frames tokens channels"]:
        """All tokens of every frame, on every rank."""
        n = self.group.size
        if n == 1:
            return x
        send = x.contiguous()
        received = self._buffer("gather", x, (n, *x.shape))
        with self.traffic.gather.counted(send.nbytes * (n - 1)):
            self.group.all_gather(received, send)
        return received.transpose(0, 1).flatten(1, 2)

    def _all_to_all(self, received: Tensor, send: Tensor, kind: TrafficKind) -> None:
        # The part that stays here is not sent.
        with kind.counted(send.nbytes - send.nbytes // self.group.size):
            dist.all_to_all_single(received, send, group=self.group.group)

    def _buffer(self, use: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        key = (use, like.dtype, shape)
        if key not in self._buffers:
            if len(self._buffers) == _MOST_BUFFERS:
                del self._buffers[next(iter(self._buffers))]
            self._buffers[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]
