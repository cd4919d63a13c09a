"""Temporal state of a streaming encode or decode, owned by the caller.

Nothing here is changed in place: a call takes one state and returns another, so the old one
stays valid when the call fails. ``None`` marks a layer that has not run in this session. For a
temporal resampler that is the mark of its first call, which passes frames through; for every
other convolution it stands for frames of zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Frames = Float[Tensor, "_ _ _ _"]
"""Last input frames of one convolution: one or two, ``[time, height, width, channels]``."""


@dataclass(frozen=True, slots=True)
class ResidualHistory:
    """Histories of the two causal convolutions of a residual block."""

    conv1: Frames | None = None
    conv2: Frames | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held."""
        yield from _present(self.conv1, self.conv2)


@dataclass(frozen=True, slots=True)
class LevelHistory:
    """Histories of one resolution: of its residual blocks and, if it has one, its resampler."""

    residuals: tuple[ResidualHistory, ...]
    resampler: Frames | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held."""
        for residual in self.residuals:
            yield from residual.tensors()
        yield from _present(self.resampler)


@dataclass(frozen=True, slots=True)
class CoderHistory:
    """Histories of a whole encoder or decoder."""

    middle: tuple[ResidualHistory, ResidualHistory]
    levels: tuple[LevelHistory, ...]
    conv_in: Frames | None = None
    conv_out: Frames | None = None

    @classmethod
    def fresh(cls, residuals_per_level: int, levels: int) -> "CoderHistory":
        """Return the history of a session that has not begun."""
        blocks = (ResidualHistory(),) * residuals_per_level
        return cls(
            middle=(ResidualHistory(), ResidualHistory()), levels=(LevelHistory(blocks),) * levels
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held, in a fixed order."""
        yield from _present(self.conv_in, self.conv_out)
        for residual in self.middle:
            yield from residual.tensors()
        for level in self.levels:
            yield from level.tensors()


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream of latent frames carries from one call to the next.

    Attributes:
        latent_frames: latent frames coded so far.
        history: ``None`` before the first.
    """

    latent_frames: int = 0
    history: CoderHistory | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held."""
        if self.history is not None:
            yield from self.history.tensors()

    def bytes(self) -> int:
        """Count the bytes of all tensors that are held."""
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True, slots=True)
class DecoderState(StreamState):
    """State of a streaming decode between two calls."""

    @classmethod
    def fresh(cls) -> "DecoderState":
        """Return the state of a session that has not begun."""
        return cls()


@dataclass(frozen=True, slots=True)
class EncoderState(StreamState):
    """State of a streaming encode between two calls."""

    @classmethod
    def fresh(cls) -> "EncoderState":
        """Return the state of a session that has not begun."""
        return cls()

    def same_history(self, other: "EncoderState") -> bool:
        """Tell whether both would continue with the same bits."""
        mine, theirs = list(self.tensors()), list(other.tensors())
        return len(mine) == len(theirs) and all(
            a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(mine, theirs, strict=True)
        )


def _present(*frames: Tensor | None) -> Iterator[Tensor]:
    return (tensor for tensor in frames if tensor is not None)
