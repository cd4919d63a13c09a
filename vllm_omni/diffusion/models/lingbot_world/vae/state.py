"""Temporal state of a streaming encode or decode, owned by the caller.

Nothing here is changed in place: a call takes one state and returns another, so the old one
stays valid when the call fails. ``None`` marks a layer that has not run in this session. For a
temporal resampler that is the mark of its first call, which passes frames through; for every
other convolution it stands for frames of zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor

Frames = Float[Tensor, "_ _ _ _"]
"""Last input frames of one convolution: one or two, ``[time, height, width, channels]``."""


@dataclass(frozen=True, slots=True)
class CoderHistory:
    """Histories of a whole encoder or decoder, in the order in which its layers run.

    Attributes:
        frames: what each layer has kept; empty before the first frame of a session.
    """

    frames: tuple[Frames | None, ...] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held, in a fixed order."""
        return (frames for frames in self.frames if frames is not None)


class CoderRun:
    """One run of a coder, which gives each layer its history and keeps what the layer leaves."""

    def __init__(self, history: CoderHistory) -> None:
        self._before = iter(history.frames) if history.frames else repeat(None)
        self._kept: list[Frames | None] = []

    def layer(
        self, layer: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, *arguments: object
    ) -> Float[Tensor, "out_time out_height out_width out_channels"]:
        """Run the next layer that has a history: ``layer(x, history, *arguments)``."""
        y, kept = layer(x, next(self._before), *arguments)
        self._kept.append(kept)
        return y

    def history(self) -> CoderHistory:
        """Return what the layers have left for the next run."""
        return CoderHistory(tuple(self._kept))


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream of latent frames carries from one call to the next, at first nothing.

    Attributes:
        latent_frames: latent frames coded so far.
    """

    latent_frames: int = 0
    history: CoderHistory = CoderHistory()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held."""
        return self.history.tensors()

    def bytes(self) -> int:
        """Count the bytes of all tensors that are held."""
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True, slots=True)
class DecoderState(StreamState):
    """State of a streaming decode between two calls."""


@dataclass(frozen=True, slots=True)
class EncoderState(StreamState):
    """State of a streaming encode between two calls."""

    def same_history(self, other: "EncoderState") -> bool:
        """Tell whether both would continue with the same bits."""
        mine, theirs = list(self.tensors()), list(other.tensors())
        # The last layers settle last, and each comparison waits for the device.
        return len(mine) == len(theirs) and all(
            a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(reversed(mine), reversed(theirs), strict=True)
        )
