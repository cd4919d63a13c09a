"""NVIDIA GPUs."""

import torch

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.accelerator import AcceleratorPlatform
from vllm_omni.platforms.graphs import DeviceGraphRuntime, GraphInterface, GraphRuntime
from vllm_omni.platforms.int8 import Int8Ops
from vllm_omni.platforms.rotary import RotaryMul


class CudaPlatform(AcceleratorPlatform):
    """Device memory by the caching allocator, NCCL, fused attention kernels through SDPA."""

    name = "cuda"
    collective_backend = "nccl"
    attention_backend = "flash"

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def device(self, local_rank: int) -> torch.device:
        """GPU ``local_rank`` among the visible ones.

        Raises:
            ConfigError: if this torch sees no such GPU.
        """
        visible = torch.cuda.device_count()
        if visible <= local_rank:
            raise ConfigError(
                f"rank {local_rank} needs device cuda, but torch {torch.__version__} sees "
                f"{visible} GPUs; install a CUDA build of torch and its driver, or set device: cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def completion_event(self, device: torch.device) -> None:
        """The allocator reuses memory in the order of the queue that the exchange joined."""
        del device

    def int8_ops(self) -> Int8Ops:
        """None here.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "lingbot_npu_quant has operators for device npu and a reference for cpu, got cuda; "
            "leave it out"
        )

    def rotary_mul(self) -> RotaryMul:
        """None here.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "lingbot_npu_rotary_mul has an operator for device npu and a reference for cpu, got "
            "cuda; leave it out"
        )

    def graph_runtime(self) -> GraphRuntime:
        """Captures by CUDA graph."""
        return DeviceGraphRuntime("cuda", GraphInterface(torch.cuda, torch.cuda.CUDAGraph))
