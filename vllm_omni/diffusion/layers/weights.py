"""Where each tensor of a checkpoint goes: into which parameter, which part of it, at which row."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from vllm_omni.diffusion.distributed.parallel_state import RankGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a checkpoint tensor that this rank holds, along one axis."""

    axis: int
    start: int
    length: int

    @classmethod
    def of(cls, group: RankGroup, axis: int, full_length: int) -> "Shard":
        """Even share of ``full_length`` for this rank of ``group``."""
        length = full_length // group.size
        return cls(axis, group.rank * length, length)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Destination of one checkpoint tensor.

    Attributes:
        parameter: written in place.
        shape: of the whole tensor in the checkpoint.
        shard: part that this rank reads; ``None`` is all of it.
        first_row: row of ``parameter`` where the part begins (fused parameters hold several).
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    shard: Shard | None = None
    first_row: int = 0

    def local_slices(self) -> tuple[slice, ...]:
        """Index of this rank's part in the checkpoint tensor."""
        slices = [slice(0, size) for size in self.shape]
        if self.shard is not None:
            slices[self.shard.axis] = slice(self.shard.start, self.shard.start + self.shard.length)
        return tuple(slices)

    def store(self, part: Tensor) -> None:
        """Copy the local part into the parameter, converting its dtype."""
        rows = part.shape[0]
        self.parameter.data[self.first_row : self.first_row + rows].copy_(part)


class WeightedModule(nn.Module):
    """A module whose parameters are not laid out as its checkpoint tensors are."""

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yield (checkpoint name, destination) for every tensor under ``prefix``."""
        raise NotImplementedError


def weight_targets(module: nn.Module, prefix: str = "") -> dict[str, WeightTarget]:
    """Destinations of all checkpoint tensors of ``module``, keyed by checkpoint name."""
    if isinstance(module, WeightedModule):
        return dict(module.weight_targets(prefix))
    targets = {
        f"{prefix}{name}": WeightTarget(parameter, tuple(parameter.shape))
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, child in module.named_children():
        targets.update(weight_targets(child, f"{prefix}{name}."))
    return targets
