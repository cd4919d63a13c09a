"""Process groups of one worker world: tensor parallel x sequence parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


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


SINGLE = RankGroup(rank=0, size=1, group=None)
"""A rank that is alone."""


@dataclass(frozen=True, slots=True)
class ParallelState:
    """The groups of one rank.

    Attributes:
        tensor: ranks that share the weights of each linear.
        sequence: ranks that share the tokens of each latent frame.
    """

    tensor: RankGroup = SINGLE
    sequence: RankGroup = SINGLE
