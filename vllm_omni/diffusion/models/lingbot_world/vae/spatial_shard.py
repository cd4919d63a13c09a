"""Width sharding of the decoder: each rank decodes its own columns of every frame.

Rank r of n owns latent columns ``[r * s, (r + 1) * s)`` with ``s = ceil(latent_width / n)``, and
the pixels that they become. Where n does not divide the width the last ranks hold columns beyond
the frame. Their values never matter: every 3x3 convolution sees zeros there, as it does at the
frame's edge, and gathering cuts them off.

Temporal histories are kept without halo, so a rank's state is its share of the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from typing_extensions import override

from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import Columns


@runtime_checkable
class HaloExchange(Protocol):
    """The exchanges of a rank with those beside it. Every rank makes the same calls in order."""

    @property
    def rank(self) -> int:
        """Place of this rank, counted from the left."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks that share a frame."""
        ...

    def swap(
        self,
        left: Float[Tensor, "time height 1 channels"],
        right: Float[Tensor, "time height 1 channels"],
    ) -> tuple[
        Float[Tensor, "time height 1 channels"] | None,
        Float[Tensor, "time height 1 channels"] | None,
    ]:
        """Give this rank's border columns to its neighbours and get theirs.

        Returns:
            The left neighbour's right border and the right neighbour's left border; ``None``
            where there is no neighbour.
        """
        ...

    def gather(self, slab: Shaped[Tensor, "..."]) -> Shaped[Tensor, "size ..."]:
        """Collect the slabs of all ranks, in order, on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class GroupExchange(HaloExchange):
    """Exchanges over a process group, point to point and by one all-gather."""

    group: RankGroup

    @property
    @override
    def rank(self) -> int:
        return self.group.rank

    @property
    @override
    def size(self) -> int:
        return self.group.size

    @override
    def swap(
        self,
        left: Float[Tensor, "time height 1 channels"],
        right: Float[Tensor, "time height 1 channels"],
    ) -> tuple[
        Float[Tensor, "time height 1 channels"] | None,
        Float[Tensor, "time height 1 channels"] | None,
    ]:
        """Send and receive all four messages in one batch."""
        from_left = torch.empty_like(left) if self.rank > 0 else None
        from_right = torch.empty_like(right) if self.rank < self.size - 1 else None
        operations: list[dist.P2POp] = []
        for outgoing, incoming, peer in (
            (left, from_left, self.rank - 1),
            (right, from_right, self.rank + 1),
        ):
            if incoming is not None:
                operations.append(self._operation(dist.isend, outgoing, peer))
                operations.append(self._operation(dist.irecv, incoming, peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return from_left, from_right

    @override
    def gather(self, slab: Shaped[Tensor, "..."]) -> Shaped[Tensor, "size ..."]:
        if self.size == 1:
            return slab[None]
        received = slab.new_empty(self.size, *slab.shape)
        self.group.all_gather(received, slab.contiguous())
        return received

    def _operation(
        self, send_or_receive: Callable[..., object], tensor: Tensor, peer: int
    ) -> dist.P2POp:
        return dist.P2POp(send_or_receive, tensor, group=self.group.group, group_peer=peer)


@dataclass(frozen=True, slots=True)
class ColumnShard(Columns):
    """The columns of this rank, at every resolution of the decoder.

    The width of a tensor tells its resolution.

    Attributes:
        latent_width: number of latent columns of the whole frame.
    """

    exchange: HaloExchange
    latent_width: int

    @property
    @override
    def width_padding(self) -> int:
        return 0  # the columns of the neighbours stand where the zeros would

    @property
    def slab_latent_width(self) -> int:
        """Number of latent columns of one rank, with those beyond the frame."""
        return -(-self.latent_width // self.exchange.size)

    @override
    def own(
        self, full: Float[Tensor, "time height full_width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Fill columns beyond the frame with zeros."""
        slab_width = self.slab_latent_width * (full.shape[2] // self.latent_width)
        first = self.exchange.rank * slab_width
        slab = full.new_zeros(*full.shape[:2], slab_width, full.shape[3])
        mine = full[:, :, first : first + slab_width]
        slab[:, :, : mine.shape[2]] = mine
        return slab

    @override
    def halo(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height wider channels"]:
        time, height, width, channels = slab.shape
        inside = self._columns_inside(width)
        wider = slab.new_zeros(time, height, width + 2, channels)
        wider[:, :, 1 : 1 + inside] = slab[:, :, :inside]
        left, right = self.exchange.swap(
            wider[:, :, 1:2].contiguous(), wider[:, :, width : width + 1].contiguous()
        )
        if left is not None:
            wider[:, :, :1] = left
        if right is not None:
            wider[:, :, -1:] = right
        return wider

    @override
    def gather(
        self, slab: Shaped[Tensor, "time height width channels"]
    ) -> Shaped[Tensor, "time height full_width channels"]:
        """Cut the whole frame to its true width."""
        scale = slab.shape[2] // self.slab_latent_width
        slabs = self.exchange.gather(slab)
        full = slabs.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return full[:, :, : self.latent_width * scale].contiguous()

    def _columns_inside(self, slab_width: int) -> int:
        """Count the columns of this rank that lie inside the frame."""
        frame_width = self.latent_width * (slab_width // self.slab_latent_width)
        return min(slab_width, max(0, frame_width - self.exchange.rank * slab_width))
