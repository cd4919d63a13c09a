"""Exchanges between the ranks that share the tokens of each latent frame (Ulysses).

Rank r of n holds the tokens ``[r * P / n, (r + 1) * P / n)`` of *every* latent frame, P being the
tokens of a frame. A model splits what it takes in token by token (patches of latents and camera,
rotary tables) and joins what it puts out. Everything else is whole on every rank: timestep rows,
keys and values of the prompt, weights.

Attention needs all tokens of some heads instead of some tokens of all heads. So in each layer one
message exchanges keys and values, one the queries, which are made while the first is on its way,
and one the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic, RankGroup, TrafficKind
from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The tokens that one rank holds."""

    rank: int
    size: int

    def local_count(self, tokens: int) -> int:
        """Number of tokens on each rank out of ``tokens`` of whole latent frames."""
        return tokens // self.size

    def split(
        self, x: Float[Tensor, "frames tokens *rest"]
    ) -> Float[Tensor, "frames local_tokens *rest"]:
        """Take this rank's tokens of every frame."""
        share = self.local_count(x.shape[1])
        return x[:, self.rank * share : (self.rank + 1) * share]

    def join(
        self, shares: Float[Tensor, "ranks frames local_tokens channels"]
    ) -> Float[Tensor, "frames tokens channels"]:
        """Put the shares of all ranks together, in the order of ranks."""
        return shares.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Message:
    """What this rank sends to the others while it goes on.

    Attributes:
        sent: memory that is not written until the message is out.
        kind: counts the time that the host waits.
    """

    work: dist.Work
    sent: Tensor
    kind: TrafficKind

    def wait(self) -> None:
        """Let what follows wait for what the other ranks send; a device waits, not its host."""
        with self.kind.timed():
            self.work.wait()


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors that a message brings; a rank that is alone has them already."""

    tensors: tuple[Float[Tensor, "*tokens local_heads head_dim"], ...]
    message: Message | None = None

    def wait(self) -> tuple[Float[Tensor, "*tokens local_heads head_dim"], ...]:
        """Return the tensors once they may be read."""
        if self.message is not None:
            self.message.wait()
        return self.tensors


_MOST_BUFFERS = 32
"""Enough for four sizes of video. A limit is needed, since a server may meet ever new sizes."""


class UlyssesExchange:
    """The exchanges of one rank. A rank that is alone returns its tensors unchanged.

    Send and receive buffers are allocated once per shape and used again; when there are many, the
    oldest makes room.

    Attributes:
        plan: which tokens this rank holds.
        traffic: counts what was exchanged so far.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.plan = SequencePlan(group.rank, group.size)
        self.traffic = ExchangeTraffic()
        self._buffers: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def tokens_to_heads(
        self, *tensors: Float[Tensor, "local_tokens heads head_dim"], latent_frames: int
    ) -> Arriving:
        """Give up tokens and get all tokens of this rank's heads, in the order (frame, token).

        All tensors travel in one message, which is on its way when this returns. Nothing is
        reordered here: what arrives is a view of the receive buffer, whose leading axes together
        are the tokens. Whoever reads it writes it where it belongs, before the next exchange of
        the same shape and number of tensors.
        """
        n = self.group.size
        if n == 1:
            return Arriving(tensors)
        count, (local_tokens, heads, head_dim) = len(tensors), tensors[0].shape
        shape = (n, latent_frames, local_tokens // latent_frames, count, heads // n, head_dim)
        send = self._buffer("heads send", tensors[0], shape)
        for index, tensor in enumerate(tensors):
            # [frames, local, n, heads / n, dim] -> [n, frames, local, heads / n, dim]
            split = tensor.unflatten(0, (latent_frames, -1)).unflatten(2, (n, -1))
            send[:, :, :, index].copy_(split.permute(2, 0, 1, 3, 4))
        received = self._buffer("heads receive", tensors[0], shape)
        message = self._all_to_all(received, send, self.traffic.heads)
        # [n, frames, local, count, heads / n, dim] -> count of [frames, n, local, heads / n, dim]
        return Arriving(received.permute(3, 1, 0, 2, 4, 5).unbind(0), message)

    def heads_to_tokens(
        self, x: Float[Tensor, "tokens local_heads head_dim"], *, latent_frames: int
    ) -> Float[Tensor, "local_tokens heads head_dim"]:
        """Give up heads and get all heads of this rank's tokens, for the attention output."""
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
        """Do the same as :meth:`heads_to_tokens`, but write into memory that the caller owns.

        Raises:
            ValueError: if ``target`` does not fit. Nothing was exchanged then.
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
        """Exchange and return a view of the receive buffer in the order of tokens and heads."""
        # [frames, n, local, heads / n, dim] -> [n, frames, local, heads / n, dim]
        split = x.unflatten(0, (latent_frames, self.group.size, -1)).permute(1, 0, 2, 3, 4)
        send = self._buffer("tokens send", x, tuple(split.shape))
        send.copy_(split)
        received = self._buffer("tokens receive", x, tuple(split.shape))
        self._all_to_all(received, send, self.traffic.tokens).wait()
        return received.permute(1, 2, 0, 3, 4)

    def gather_tokens(
        self, x: Float[Tensor, "frames local_tokens channels"]
    ) -> Float[Tensor, "frames tokens channels"]:
        """Get all tokens of every frame, on every rank."""
        n = self.group.size
        if n == 1:
            return x
        send = x.contiguous()
        received = self._buffer("gather", x, (n, *x.shape))
        with self.traffic.gather.counted(send.nbytes * (n - 1)):
            self.group.all_gather(received, send)
        return self.plan.join(received)

    def _all_to_all(self, received: Tensor, send: Tensor, kind: TrafficKind) -> Message:
        # The part that stays here is not sent. Every call goes the asynchronous way, which has one
        # queue for the group: messages come in their order.
        with kind.counted(send.nbytes - send.nbytes // self.group.size):
            work = dist.all_to_all_single(received, send, group=self.group.group, async_op=True)
        assert work is not None, "this rank is in its group"
        return Message(work, send, kind)

    def _buffer(self, use: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        key = (use, like.dtype, shape)
        if key not in self._buffers:
            if len(self._buffers) == _MOST_BUFFERS:
                del self._buffers[next(iter(self._buffers))]
            self._buffers[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]


_FRAMES = 2
_LOCAL_TOKENS = 3
_LOCAL_HEADS = 2
_HEAD_DIM = 4
_DISTINCT = 251
"""Prime, and small enough for every integer below it to be exact in bfloat16."""


def check_exchange(exchange: UlyssesExchange, *, dtype: torch.dtype, device: torch.device) -> None:
    """Exchange numbers whose places are known, there and back, once, at start-up.

    Some releases of device libraries exchange zeros between more than two ranks, without an error.
    Every rank of the group makes this call.

    Raises:
        ConfigError: if a number is not where it belongs.
    """
    group = exchange.group
    if group.size == 1:
        return
    tokens, heads = _LOCAL_TOKENS * group.size, _LOCAL_HEADS * group.size
    everything = _numbered(_FRAMES, tokens, heads, _HEAD_DIM).to(dtype)
    mine = exchange.plan.split(everything).flatten(0, 1)
    sent = (mine.to(device), (mine + 1).to(device))
    exchanged = exchange.tokens_to_heads(*sent, latent_frames=_FRAMES)
    by_heads = [part.flatten(0, -3) for part in exchanged.wait()]
    first = group.rank * _LOCAL_HEADS
    wanted = everything.flatten(0, 1)[:, first : first + _LOCAL_HEADS]
    back = exchange.heads_to_tokens(by_heads[0], latent_frames=_FRAMES)
    right = (
        torch.equal(by_heads[0].cpu(), wanted)
        and torch.equal(by_heads[1].cpu(), wanted + 1)
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
