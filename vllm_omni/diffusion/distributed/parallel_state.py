"""Process groups of one worker world: tensor parallel x sequence parallel.

Global rank = sequence rank x tensor_parallel_size + tensor rank. Ranks that share weights are
neighbours, since they exchange most often; the root, global rank 0, is rank 0 of both its groups.
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

_STORE_FILE = "store"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank's place in a group of ranks that work on one thing together.

    Attributes:
        rank: index inside the group.
        size: number of ranks.
        group: the process group; ``None`` when the rank is alone.
    """

    rank: int
    size: int
    group: ProcessGroup | None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the group, in place when there is more than one rank."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, received: Tensor, part: Tensor) -> None:
        """Put every rank's ``part`` into ``received[rank]``; both contiguous, of equal dtype."""
        import torch.distributed as dist

        # Newer releases of torch have another name for the same call.
        gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
        gather(received.flatten(0, 1), part, group=self.group)

    def any(self, *, flag: bool) -> bool:
        """Whether any rank says true. The group must exchange host tensors."""
        if self.group is None:
            return flag
        import torch

        votes = torch.tensor([int(flag)], dtype=torch.int32)
        return bool(self.all_reduce(votes).item())


SINGLE = RankGroup(rank=0, size=1, group=None)
"""A rank that is alone."""


@dataclass(frozen=True, slots=True)
class ParallelState:
    """The groups of one rank.

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
        """Whether this is global rank 0, the one that hands out chunks."""
        return self.control.rank == 0

    @property
    def decodes(self) -> bool:
        """Whether this rank's sequence group holds the root: only that one decodes pixels."""
        return self.tensor.rank == 0


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """Where one process stands in a worker world, before it has any group.

    Attributes:
        rank: global rank.
        rendezvous: directory that only this generation of the world uses.
        backend: of ``torch.distributed``, for tensors of ``device``.
        timeout_s: of every collective.
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
        """Ranks of the world."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    def tensor_groups(self) -> list[list[int]]:
        """Global ranks of each tensor-parallel group."""
        size = self.tensor_parallel_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def sequence_groups(self) -> list[list[int]]:
        """Global ranks of each sequence-parallel group."""
        size = self.tensor_parallel_size
        return [list(range(first, self.world_size, size)) for first in range(size)]


def join_world(place: WorldPlace) -> ParallelState:
    """Meet the other ranks and make the groups; every rank of the world calls this once.

    One exchange in each group is done here, so that connections exist before the first chunk.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=place.timeout_s)
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.rendezvous}/{_STORE_FILE}",
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
    """End all groups of this process; needs no answer from the other ranks."""
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
