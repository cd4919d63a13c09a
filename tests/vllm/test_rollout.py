"""Whole rollouts of the tiny model on vLLM's linears, against the same on plain torch."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.rollouts import RankRollout, roll
from tests.helpers.tiny import tiny_checkpoint_dir
from tests.vllm.installed import VLLM_WARNS, requires_vllm
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.cpu,
    requires_vllm,
    VLLM_WARNS,
]

SHARED_MEMORY = Path("/dev/shm")


def tiny(dtype: str = "float32", **changes: object) -> OmniDiffusionConfig:
    config = OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), dtype=dtype, geometry=VideoGeometry(64, 96)
    )
    return replace(config, **changes)


@cache
def native(dtype: str) -> RankRollout:
    return roll(ParallelState(), tiny(dtype))


def largest_difference(one: RankRollout, other: RankRollout) -> float:
    pairs = list(zip(one.outputs, other.outputs, strict=True))
    assert pairs
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.0)])
def test_one_rank(dtype, bound):
    """Up to the order of sums in float32; bitwise in bfloat16, where one rounding hides it."""
    made = roll(ParallelState(), tiny(dtype, linear_backend="vllm"))
    difference = largest_difference(made, native(dtype))
    print(f"vLLM, one rank, {dtype}: largest difference {difference:.3g}")
    assert difference <= bound
    assert made.free_pages == native(dtype).free_pages


def test_nothing_is_left_when_the_worker_ends():
    """The next worker of the same process finds a clean one, and so does torch."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    roll(ParallelState(), tiny(linear_backend="vllm"), num_chunks=1)
    assert not model_parallel_is_initialized()
    assert not dist.is_initialized()
    roll(ParallelState(), tiny(linear_backend="vllm"), num_chunks=1)
    assert not dist.is_initialized()


def test_plain_torch_loads_no_vllm():
    """It is there to be had; nothing of it is loaded until it is chosen."""
    code = (
        "import sys, vllm_omni.diffusion.worker.worker\n"
        "import vllm_omni.diffusion.models.lingbot_world.load\n"
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parallel
@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks(tp, sp):
    """Up to the order of sums: 1e-5 on latents of unit scale. No shared memory is left behind."""
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    parallel = DiffusionParallelConfig(tensor_parallel_size=tp, ulysses_degree=sp)
    config = tiny(linear_backend="vllm", parallel=parallel, executor="mp")
    made = run_ranks(roll, config, parallel=parallel)
    difference = largest_difference(made[0], native("float32"))
    print(f"vLLM, TP{tp} x SP{sp}: largest difference {difference:.3g}")
    assert difference <= 1e-5
    assert all(not rollout.outputs for rollout in made[1:])
    left = {path.name for path in SHARED_MEMORY.iterdir()} - before
    assert not [name for name in left if "vllm" in name]
