"""vLLM's process groups over the ranks of a worker world that exists already.

vLLM's layers ask global groups for their rank. So the groups must exist before the first layer is
made, whether there is one rank or many.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.parallel_state import model_parallel_is_initialized

from vllm_omni import envs
from vllm_omni.diffusion.distributed.parallel_state import ParallelState, RankGroup

_ALONE_BACKEND = "gloo"
_NO_METHOD = "env://"
"""Never used: the default group exists before vLLM is asked."""
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The fields that vLLM's layers read of the configuration of a model."""

    dtype: torch.dtype
    is_moe: bool = False


def join_vllm_world(
    parallel: ParallelState, *, device: torch.device, dtype: torch.dtype
) -> VllmConfig:
    """Make vLLM's groups. Every rank of the world calls this once, in the same order.

    vLLM's tensor-parallel groups are neighbouring ranks, as ours are, so vLLM need not know of the
    sequence-parallel axis. A process that is alone may call this for several models, which share
    the groups, since one rank exchanges nothing.

    Returns:
        The configuration under which layers have to be made.
    """
    config = VllmConfig(device_config=DeviceConfig(device=device.type))
    config.parallel_config.tensor_parallel_size = parallel.tensor.size
    if not model_parallel_is_initialized():
        _make_groups(config, parallel, device)
    config.model_config = ModelFacts(dtype)
    return config


def leave_vllm_world() -> None:
    """End vLLM's groups and the default group. A second call does nothing."""
    destroy_model_parallel()
    destroy_distributed_environment()


def _make_groups(config: VllmConfig, parallel: ParallelState, device: torch.device) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented)
        dist.init_process_group(_ALONE_BACKEND, store=store, rank=0, world_size=1)
    name = _world_name(parallel.control)
    envs.name_vllm_world(name)
    rank = parallel.control.rank
    with set_current_vllm_config(config):
        init_distributed_environment(
            parallel.control.size,
            rank,
            _NO_METHOD,
            rank if device.index is None else device.index,
            dist.get_backend(),
        )
        initialize_model_parallel(parallel.tensor.size)
    _forget_names(name, parallel.control)


def _forget_names(name: str, control: RankGroup) -> None:
    """Remove the names of vLLM's shared memory on a CPU as soon as every rank has it open.

    vLLM removes them when a process returns from its main program, which a worker that is killed
    or that multiprocessing ends never does.
    """
    control.any(flag=False)
    if control.rank == 0:
        for path in _SHARED_MEMORY.glob(f"{name}-*"):
            path.unlink(missing_ok=True)


def _world_name(control: RankGroup) -> str:
    """A name that all ranks agree on and no other world of this machine has."""
    own = os.getpid() if control.rank == 0 else 0
    return f"vllm-omni-{int(control.all_reduce(torch.tensor([own])))}"
