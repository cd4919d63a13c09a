"""Which columns of a frame a process works on: all, or a share beside that of other ranks.

Rank r of n owns latent columns ``[r * s, (r + 1) * s)`` with ``s = ceil(latent_width / n)``, and
the pixels that they become. Where n does not divide the width the last ranks hold columns beyond
the frame. Their values never matter: every 3x3 convolution sees zeros there, as it does at the
frame's edge, and gathering cuts them off.

Temporal histories are kept without halo, so a rank's state is its share of the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from vllm_omni.diffusion.distributed.parallel_state import RankGroup


class Columns:
    """The columns of a frame that this process works on: all, unless it is a :class:`ColumnShard`.

    Attributes:
        width_padding: zero columns that a 3x3 convolution adds at each side by itself.
    """

    width_padding = 1

    def room(
        self, time: int, height: int, width: int, like: Float[Tensor, "..."]
    ) -> tuple[
        Float[Tensor, "time height wider channels"], Float[Tensor, "time height width channels"]
    ]:
        """Allocate frames with room for the border columns that a convolution does not add.

        Returns:
            The frames, which have no values yet, and a view of the columns between the borders.
        """
        frames = like.new_empty(time, height, width, like.shape[-1])
        return frames, frames

    def fill_borders(self, frames: Float[Tensor, "time height wider channels"]) -> None:
        """Complete frames of :meth:`room` whose columns between the borders were written."""

    def right_and_below(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time taller wider channels"]:
        """Return the slab with the next column, the neighbour's or zeros, and a row of zeros."""
        return F.pad(slab, (0, 0, 0, 1, 0, 1))

    def gather(
        self, slab: Shaped[Tensor, "time height width channels"]
    ) -> Shaped[Tensor, "time height full_width channels"]:
        """Return the full frame, put together from the slabs of all processes."""
        return slab

    def own(
        self, full: Float[Tensor, "time height full_width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Return this process's slab of a full frame."""
        return full


WHOLE_FRAME = Columns()


@dataclass(frozen=True, slots=True)
class ColumnShard(Columns):
    """This rank's columns: the neighbours' stand where zeros would.

    Works at every resolution of the coders: the width of what it is given says which one. Every
    rank makes the same calls in order.

    Attributes:
        group: ranks that share a frame, counted from the left.
        latent_width: latent columns of the whole frame.
    """

    group: RankGroup
    latent_width: int

    width_padding = 0

    @property
    def slab_latent_width(self) -> int:
        """Latent columns of one rank, those beyond the frame included."""
        return -(-self.latent_width // self.group.size)

    @override
    def own(
        self, full: Float[Tensor, "time height full_width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        slab_width = self.slab_latent_width * (full.shape[2] // self.latent_width)
        first = self.group.rank * slab_width
        slab = full.new_zeros(*full.shape[:2], slab_width, full.shape[3])
        mine = full[:, :, first : first + slab_width]
        slab[:, :, : mine.shape[2]] = mine
        return slab

    @override
    def room(
        self, time: int, height: int, width: int, like: Float[Tensor, "..."]
    ) -> tuple[
        Float[Tensor, "time height wider channels"], Float[Tensor, "time height width channels"]
    ]:
        frames = like.new_empty(time, height, width + 2, like.shape[-1])
        return frames, frames[:, :, 1:-1]

    @override
    def fill_borders(self, frames: Float[Tensor, "time height wider channels"]) -> None:
        """Write the neighbours' columns into the borders, and zeros outside the frame."""
        inside = self._columns_inside(frames.shape[2] - 2)
        frames[:, :, 1 + inside : -1] = 0
        left, right = self.swap(frames[:, :, 1:2].contiguous(), frames[:, :, -2:-1].contiguous())
        frames[:, :, :1] = 0 if left is None else left
        frames[:, :, -1:] = 0 if right is None else right

    @override
    def right_and_below(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time taller wider channels"]:
        time, height, width, channels = slab.shape
        inside = self._columns_inside(width)
        frames = slab.new_zeros(time, height + 1, width + 1, channels)
        own = frames[:, :-1]
        own[:, :, :inside] = slab[:, :, :inside]
        _, right = self.swap(own[:, :, :1].contiguous(), own[:, :, width - 1 : width].contiguous())
        if right is not None:
            own[:, :, -1:] = right
        return frames

    @override
    def gather(
        self, slab: Shaped[Tensor, "time height width channels"]
    ) -> Shaped[Tensor, "time height full_width channels"]:
        """Return the whole frame, cut to its true width."""
        scale = slab.shape[2] // self.slab_latent_width
        slabs = self.gather_slabs(slab)
        full = slabs.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return full[:, :, : self.latent_width * scale].contiguous()

    def _columns_inside(self, slab_width: int) -> int:
        """Count the columns of this rank that lie inside the frame."""
        frame_width = self.latent_width * (slab_width // self.slab_latent_width)
        return min(slab_width, max(0, frame_width - self.group.rank * slab_width))

    def swap(
        self,
        left: Float[Tensor, "time height 1 channels"],
        right: Float[Tensor, "time height 1 channels"],
    ) -> tuple[
        Float[Tensor, "time height 1 channels"] | None,
        Float[Tensor, "time height 1 channels"] | None,
    ]:
        """Give both neighbours this rank's border columns; all messages travel in one batch.

        Returns:
            The left neighbour's right border and the right neighbour's left border; ``None``
            where there is no neighbour.
        """
        rank = self.group.rank
        from_left = torch.empty_like(left) if rank > 0 else None
        from_right = torch.empty_like(right) if rank < self.group.size - 1 else None
        operations: list[dist.P2POp] = []
        for outgoing, incoming, peer in (
            (left, from_left, rank - 1),
            (right, from_right, rank + 1),
        ):
            if incoming is not None:
                operations.append(self._operation(dist.isend, outgoing, peer))
                operations.append(self._operation(dist.irecv, incoming, peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return from_left, from_right

    def gather_slabs(self, slab: Shaped[Tensor, "..."]) -> Shaped[Tensor, "size ..."]:
        """Return the slabs of all ranks, in order, on every rank."""
        if self.group.size == 1:
            return slab[None]
        received = slab.new_empty(self.group.size, *slab.shape)
        self.group.all_gather(received, slab.contiguous())
        return received

    def _operation(
        self, send_or_receive: Callable[..., object], tensor: Tensor, peer: int
    ) -> dist.P2POp:
        return dist.P2POp(send_or_receive, tensor, group=self.group.group, group_peer=peer)
