"""The ranks of one worker world: their groups, how they agree, and what they count.

Global rank = sequence rank x tensor_parallel_size + tensor rank. Ranks that share weights are
neighbours, since they exchange most often. The root is global rank 0, which is rank 0 of both its
groups. This module loads no torch until a group is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from vllm_omni.errors import OmniError

_STORE_FILE = "store"


class PeerRefusedError(OmniError):
    """Another rank refused a command that this rank would have carried out."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group of ranks that work together, and the place of this rank in it.

    Attributes:
        rank: index inside the group.
        size: number of ranks.
        group: the process group; ``None`` when the rank is alone.
    """

    rank: int
    size: int
    group: ProcessGroup | None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the group, in place if there is more than one rank."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """Put every rank's ``mine`` into ``received[rank]``; both contiguous, of equal dtype."""
        import torch.distributed as dist

        try:
            gather = dist.all_gather_single
        except AttributeError:  # the name of the same call in older releases of torch
            gather = dist.all_gather_into_tensor
        gather(received.flatten(0, 1), mine, group=self.group)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor on every rank of the group by that of its first rank."""
        if self.group is not None:
            import torch.distributed as dist

            dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)

    def any(self, *, flag: bool) -> bool:
        """Tell whether ``flag`` is true on any rank. The group must exchange host tensors."""
        if self.group is None:
            return flag
        import torch

        votes = torch.tensor([int(flag)], dtype=torch.int32)
        return bool(self.all_reduce(votes).item())

    def confirm(self, refusal: OmniError | None) -> None:
        """Return if no rank refuses, else raise on every rank.

        A rank that raised alone would leave its peers waiting inside an exchange. So before any
        collective every rank says with one small message whether it refuses, and none goes on
        unless all do. The group must exchange host tensors.

        Args:
            refusal: why this rank refuses; ``None`` if it does not.

        Raises:
            OmniError: ``refusal`` itself, on this rank.
            PeerRefusedError: if only other ranks refuse.
        """
        refused_by_any = self.any(flag=refusal is not None)
        if refusal is not None:
            raise refusal
        if refused_by_any:
            raise PeerRefusedError("another rank refused; see the error that it reports")


SINGLE = RankGroup(rank=0, size=1, group=None)
"""The group of a rank that is alone."""


@dataclass(frozen=True, slots=True)
class ParallelState:
    """The groups that one rank belongs to.

    Attributes:
        tensor: ranks that share the weights of each linear.
        sequence: ranks that share the tokens of each latent frame.
        control: all ranks, for small host tensors.
    """

    tensor: RankGroup = SINGLE
    sequence: RankGroup = SINGLE
    control: RankGroup = SINGLE

    @property
    def is_root(self) -> bool:
        """Whether this is global rank 0, which hands out the chunks."""
        return self.control.rank == 0

    @property
    def decodes(self) -> bool:
        """Whether this rank's sequence group contains the root: only that group decodes pixels."""
        return self.tensor.rank == 0


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """What one process needs to know to join a worker world.

    Attributes:
        rank: global rank of the process.
        rendezvous: ``tcp://HOST:PORT`` of a store, or a directory that only this generation of
            the world uses.
        backend: backend of ``torch.distributed`` for tensors of ``device``.
        timeout_s: time limit of every collective.
    """

    rank: int
    tensor_parallel_size: int
    sequence_parallel_size: int
    rendezvous: str
    backend: str
    device: torch.device
    timeout_s: float

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    @property
    def init_method(self) -> str:
        """Where the ranks meet, as ``torch.distributed`` is told."""
        is_url = "://" in self.rendezvous
        return self.rendezvous if is_url else f"file://{self.rendezvous}/{_STORE_FILE}"

    def tensor_groups(self) -> list[list[int]]:
        """Global ranks of each tensor-parallel group."""
        size = self.tensor_parallel_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def sequence_groups(self) -> list[list[int]]:
        """Global ranks of each sequence-parallel group."""
        size = self.tensor_parallel_size
        return [list(range(first, self.world_size, size)) for first in range(size)]


def join_world(place: WorldPlace) -> ParallelState:
    """Meet the other ranks and make the groups. Every rank of the world calls this once.

    Each group does one exchange here, so that its connections exist before the first chunk.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=place.timeout_s)
    dist.init_process_group(
        place.backend,
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    control = dist.new_group(list(range(place.world_size)), backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is in the group of all"
    state = ParallelState(
        tensor=_my_group(place, place.tensor_groups(), timeout),
        sequence=_my_group(place, place.sequence_groups(), timeout),
        control=RankGroup(place.rank, place.world_size, control),
    )
    _warm_up(place, state)
    return state


def leave_world() -> None:
    """End all groups of this process, without an answer from the other ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _my_group(place: WorldPlace, members: Sequence[list[int]], timeout: timedelta) -> RankGroup:
    """Make all groups of one kind, in the same order on every rank; return this rank's."""
    import torch.distributed as dist

    mine = SINGLE
    for ranks in members:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout)
        if isinstance(group, dist.ProcessGroup) and place.rank in ranks:
            mine = RankGroup(ranks.index(place.rank), len(ranks), group)
    return mine


def _warm_up(place: WorldPlace, state: ParallelState) -> None:
    import torch

    for group in (state.tensor, state.sequence):
        group.all_reduce(torch.zeros(1, device=place.device))
    state.control.any(flag=False)


@dataclass(slots=True)
class TrafficKind:
    """Counts the exchanges of one kind.

    Attributes:
        sent_bytes: bytes that left this rank, without what it keeps for itself.
        host_ms: time that the host spent in the calls and waiting for what they bring. On a device
            both only queue work.
    """

    calls: int = 0
    sent_bytes: int = 0
    host_ms: float = 0.0

    @contextmanager
    def counted(self, sent_bytes: int) -> Iterator[None]:
        """Count and time the exchange that is made, or begins, inside the context."""
        with self.timed():
            yield
        self.calls += 1
        self.sent_bytes += sent_bytes

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time inside the context."""
        started = time.perf_counter()
        yield
        self.host_ms += (time.perf_counter() - started) * 1000.0


@dataclass(slots=True)
class ExchangeTraffic:
    """Counts the exchanges of the transformer's tokens on one rank since it was started.

    Attributes:
        heads: exchanges of queries, keys and values (tokens to heads).
        tokens: exchanges of attention outputs (heads to tokens).
        gather: exchanges of the outputs of the head.
    """

    heads: TrafficKind = field(default_factory=TrafficKind)
    tokens: TrafficKind = field(default_factory=TrafficKind)
    gather: TrafficKind = field(default_factory=TrafficKind)

    @property
    def total(self) -> TrafficKind:
        """The sum over all kinds."""
        kinds = (self.heads, self.tokens, self.gather)
        return TrafficKind(
            calls=sum(kind.calls for kind in kinds),
            sent_bytes=sum(kind.sent_bytes for kind in kinds),
            host_ms=sum(kind.host_ms for kind in kinds),
        )


def is_root() -> bool:
    """Whether this process speaks for all ranks in the log."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
