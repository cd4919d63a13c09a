"""Ranks that are not there: what one rank would exchange with them is counted, nothing is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from benchmarks.lingbot_world.kernel_counter import Kernel, Kind, note
from vllm_omni.diffusion.distributed.comm import Message, UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import RankGroup, TrafficKind
from vllm_omni.diffusion.models.lingbot_world.vae.columns import ColumnShard


@dataclass(frozen=True, slots=True)
class SilentGroup(RankGroup):
    """A place among ranks that are not there: nothing is sent, what arrives has no values."""

    @override
    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """Leave ``received`` as it is; on ``meta`` it has no values."""
        note(
            Kernel("gather", Kind.MESSAGE, mine.nbytes * (self.size - 1)),
            Kernel("gather", Kind.WAIT, 0),
        )


@dataclass(frozen=True, slots=True)
class SilentMessage(Message):
    """A message that nobody gets."""

    name: str

    @override
    def wait(self) -> None:
        note(Kernel(self.name, Kind.WAIT, 0))


class SilentExchange(UlyssesExchange):
    """Packs, counts and unpacks as the product does, and sends nothing."""

    @override
    def _all_to_all(self, received: Tensor, send: Tensor, kind: TrafficKind) -> Message:
        name = f"all to all of {tuple(send.shape)}"
        sent_bytes = send.nbytes - send.nbytes // self.group.size
        with kind.counted(sent_bytes):
            note(Kernel(name, Kind.MESSAGE, sent_bytes))
        return SilentMessage(Work(), send, kind, name)


@dataclass(frozen=True, slots=True)
class SilentShard(ColumnShard):
    """A rank with a neighbour at each side."""

    @override
    def swap(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return borders of the right shape."""
        return torch.empty_like(left), torch.empty_like(right)

    @override
    def gather_slabs(self, slab: Tensor) -> Tensor:
        """Return slabs of the right shape."""
        return slab.new_empty(self.group.size, *slab.shape)
