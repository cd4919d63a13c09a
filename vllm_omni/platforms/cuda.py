"""The platform of NVIDIA GPUs."""

import torch
from typing_extensions import override

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import AcceleratorPlatform, Int8Ops, RotaryMul
from vllm_omni.platforms.graphs import DeviceGraphRuntime, GraphRuntime

_OLDEST_TORCH = (2, 11)


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version of torch."""
    return tuple(int(part) for part in version.split(".")[:2])


class CudaPlatform(AcceleratorPlatform):
    """Runs on one GPU per rank, with NCCL and torch's fused attention kernels."""

    name = "cuda"
    collective_backend = "nccl"
    attention_backend = "flash"

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    @override
    def device(self, local_rank: int) -> torch.device:
        """Return GPU ``local_rank`` of those that are visible.

        Raises:
            ConfigError: if this torch is too old or sees no such GPU.
        """
        if _release(torch.__version__) < _OLDEST_TORCH:
            raise ConfigError(
                f"device cuda needs torch 2.11 or newer, got {torch.__version__}, whose cuDNN "
                "computes attention wrongly; install a newer CUDA build of torch"
            )
        visible = torch.cuda.device_count()
        if visible <= local_rank:
            raise ConfigError(
                f"rank {local_rank} needs device cuda, but torch {torch.__version__} sees "
                f"{visible} GPUs; install a CUDA build of torch and its driver, or set device: cpu"
            )
        # float32 means float32: convolutions would take TF32 unless told otherwise.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    @override
    def completion_event(self, device: torch.device) -> None:
        del device  # the allocator reuses memory in the order of the queue

    @override
    def int8_ops(self) -> Int8Ops:
        raise ConfigError(
            "lingbot_npu_quant has operators for device npu and a reference for cpu, got cuda; "
            "leave it out"
        )

    @override
    def rotary_mul(self) -> RotaryMul:
        raise ConfigError(
            "lingbot_npu_rotary_mul has an operator for device npu and a reference for cpu, got "
            "cuda; leave it out"
        )

    @override
    def graph_runtime(self) -> GraphRuntime:
        return DeviceGraphRuntime("cuda", torch.cuda, torch.cuda.CUDAGraph)
