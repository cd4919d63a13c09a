"""NVIDIA GPUs."""

import torch

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.graphs import DeviceGraphRuntime, GraphInterface, GraphRuntime
from vllm_omni.platforms.int8 import Int8Ops
from vllm_omni.platforms.laps import DeviceLaps, LapClock
from vllm_omni.platforms.rotary import RotaryMul


class CudaPlatform:
    """Device memory by the caching allocator, NCCL, fused attention kernels through SDPA."""

    name = "cuda"
    collective_backend = "nccl"
    attention_backend = "flash"
    pool_from_free_memory = True

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

    def free_bytes(self, device: torch.device) -> int:
        """Free memory of the driver, once the allocator has given back what it can.

        What it keeps, pieces between other tensors and memory of graphs, fits no new pool.
        """
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return free

    def peak_bytes(self, device: torch.device) -> int:
        """Peak of allocated bytes."""
        return torch.cuda.max_memory_allocated(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize(device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy through pinned memory and wait for this copy only, not for work queued later."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(tensor.device))
        done.synchronize()
        return host

    def completion_event(self, device: torch.device) -> None:
        """The allocator reuses memory in the order of the queue that the exchange joined."""
        del device

    def lap_clock(self, device: torch.device) -> LapClock:
        """Timed CUDA events."""
        return DeviceLaps(torch.cuda, device)

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
