"""Rollouts of one rank among several, whose collectives and tensor shapes are looked at."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.rollouts import RankRollout, roll
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.messages import OutputKind

WATCHED_CHUNKS = 2


class ShapeGuard(TorchDispatchMode):
    """Remembers tensors that hold six modulation rows for each of many tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.tensors = 0
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.tensors += 1
                self._look_at(tuple(leaf.shape))
        return result

    def _look_at(self, shape: tuple[int, ...]) -> None:
        modulation = shape[-2:] == (6, self.dim) or shape[-1:] == (6 * self.dim,)
        if modulation and math.prod(shape) > 3 * 6 * self.dim:
            self.found.append(shape)


@dataclass
class Collectives:
    """Calls of torch.distributed on one rank: name to bytes that left the rank."""

    sent: dict[str, list[int]]
    rollout: RankRollout
    guarded: int
    modulation_shapes: list[tuple[int, ...]]


def roll_watched(state: ParallelState, config: OmniDiffusionConfig, output: OutputKind):
    """Two chunks, with every collective and every tensor shape looked at from outside."""
    sent: dict[str, list[int]] = {}
    patch = pytest.MonkeyPatch()
    gather = "all_gather_single" if "all_gather_single" in vars(dist) else "all_gather_into_tensor"
    size = dist.get_world_size()

    def watch(name, bytes_of):
        original = vars(dist)[name]

        def call(*args, **kwargs):
            sent.setdefault(name, []).append(bytes_of(*args))
            return original(*args, **kwargs)

        patch.setattr(dist, name, call)

    watch("all_to_all_single", lambda _out, part, *_: part.nbytes * (size - 1) // size)
    watch(gather, lambda _out, part, *_: part.nbytes * (size - 1))
    watch("all_reduce", lambda tensor, *_: tensor.nbytes)
    watch("batch_isend_irecv", lambda operations: sum(
        operation.tensor.nbytes for operation in operations if operation.op is dist.isend
    ))  # fmt: skip
    guard = ShapeGuard(dim=64)
    with guard:
        rollout = roll(state, config, output, WATCHED_CHUNKS)
    patch.undo()
    sent["gather"] = sent.pop(gather, [])
    return Collectives(sent, rollout, guard.tensors, guard.found)
