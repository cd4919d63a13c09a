"""Which columns of a frame a process works on: all, or as ``spatial_shard.py`` has it a share."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


@runtime_checkable
class Columns(Protocol):
    """Which columns of a frame this process works on."""

    @property
    def width_padding(self) -> int:
        """Zero columns that a 3x3 convolution adds at each side by itself."""
        ...

    def room(
        self, time: int, height: int, width: int, like: Float[Tensor, "..."]
    ) -> tuple[
        Float[Tensor, "time height wider channels"], Float[Tensor, "time height width channels"]
    ]:
        """Allocate frames with a border column at each side that has a neighbour's or zeros.

        Returns:
            The frames, which have no values yet, and a view of the columns between the borders.
        """
        ...

    def fill_borders(self, frames: Float[Tensor, "time height wider channels"]) -> None:
        """Complete frames of :meth:`room` whose columns between the borders were written."""
        ...

    def right_and_below(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time taller wider channels"]:
        """Return the slab with the next column, the neighbour's or zeros, and a row of zeros."""
        ...

    def gather(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height full_width channels"]:
        """Return the full frame, put together from the slabs of all processes."""
        ...

    def own(
        self, full: Float[Tensor, "time height full_width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Return this process's slab of a full frame."""
        ...


class WholeFrame:
    """All columns: nothing is exchanged, convolutions pad by themselves."""

    width_padding = 1

    def room(
        self, time: int, height: int, width: int, like: Float[Tensor, "..."]
    ) -> tuple[
        Float[Tensor, "time height width channels"], Float[Tensor, "time height width channels"]
    ]:
        """Allocate frames alone: a convolution pads them by itself, so that nothing is written."""
        frames = like.new_empty(time, height, width, like.shape[-1])
        return frames, frames

    def fill_borders(self, frames: Float[Tensor, "time height width channels"]) -> None:
        """Do nothing: there are none."""

    def right_and_below(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time taller wider channels"]:
        """Return the slab with a column and a row of zeros."""
        return F.pad(slab, (0, 0, 0, 1, 0, 1))

    def gather(
        self, slab: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Return the slab itself: it is the full frame."""
        return slab

    def own(
        self, full: Float[Tensor, "time height width channels"]
    ) -> Float[Tensor, "time height width channels"]:
        """Return the frame itself: this process owns all of it."""
        return full


WHOLE_FRAME = WholeFrame()
