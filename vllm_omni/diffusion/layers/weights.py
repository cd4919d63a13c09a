"""Where each tensor of a checkpoint goes: the parameter, this rank's share, the first row."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from vllm_omni.diffusion.distributed.parallel_state import RankGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a checkpoint tensor that this rank holds along one axis."""

    axis: int
    start: int
    length: int

    @classmethod
    def of(cls, group: RankGroup, axis: int, full_length: int) -> "Shard":
        """Give this rank of ``group`` its even share of ``full_length``."""
        length = full_length // group.size
        return cls(axis, group.rank * length, length)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The destination of one checkpoint tensor.

    Attributes:
        parameter: parameter that is written in place.
        shape: shape of the whole tensor in the checkpoint.
        shard: share that this rank reads; ``None`` for all of it.
        first_row: row of ``parameter`` where the share begins; a fused parameter holds several.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    shard: Shard | None = None
    first_row: int = 0

    def local_slices(self) -> tuple[slice, ...]:
        """Return the index of this rank's share in the checkpoint tensor."""
        slices = [slice(0, size) for size in self.shape]
        if self.shard is not None:
            slices[self.shard.axis] = slice(self.shard.start, self.shard.start + self.shard.length)
        return tuple(slices)

    def store(self, share: Tensor) -> None:
        """Copy this rank's share into the parameter and convert its dtype."""
        rows = share.shape[0]
        self.parameter.data[self.first_row : self.first_row + rows].copy_(share)


class WeightedModule(nn.Module):
    """A module whose parameters differ from its checkpoint tensors in layout."""

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yield (checkpoint name, destination) for every tensor under ``prefix``."""
        raise NotImplementedError


def weight_targets(module: nn.Module, prefix: str = "") -> dict[str, WeightTarget]:
    """Map the name of each checkpoint tensor of ``module`` to its destination."""
    if isinstance(module, WeightedModule):
        return dict(module.weight_targets(prefix))
    targets = {
        f"{prefix}{name}": WeightTarget(parameter, tuple(parameter.shape))
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, child in module.named_children():
        targets.update(weight_targets(child, f"{prefix}{name}."))
    return targets
