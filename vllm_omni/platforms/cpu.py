"""The CPU: development, tests and the demo."""

import os
import resource
from pathlib import Path

import torch

from vllm_omni.platforms.graphs import EagerGraphRuntime, GraphRuntime
from vllm_omni.platforms.int8 import Int8Ops, ReferenceInt8Ops
from vllm_omni.platforms.laps import HostLaps, LapClock
from vllm_omni.platforms.rotary import ReferenceRotaryMul, RotaryMul

_KIB = 1024
_MEMINFO = Path("/proc/meminfo")


class CpuPlatform:
    """Host memory, gloo, scaled-dot-product attention."""

    name = "cpu"
    collective_backend = "gloo"
    attention_backend = "sdpa"
    pool_from_free_memory = False

    def device(self, local_rank: int) -> torch.device:
        """The host itself, whatever the rank."""
        del local_rank
        return torch.device("cpu")

    def free_bytes(self, device: torch.device) -> int:
        """Memory that new tensors can take: free pages and, on Linux, caches that give way."""
        del device
        if _MEMINFO.is_file():
            for line in _MEMINFO.read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * _KIB
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self, device: torch.device) -> int:
        """Largest resident size of this process."""
        del device
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    def synchronize(self, device: torch.device) -> None:
        """Nothing is queued on a CPU."""
        del device

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def completion_event(self, device: torch.device) -> None:
        """Exchanges end when their call returns."""
        del device

    def lap_clock(self, device: torch.device) -> LapClock:
        """The host's own clock."""
        del device
        return HostLaps()

    def int8_ops(self) -> Int8Ops:
        """The arithmetic in plain torch."""
        return ReferenceInt8Ops()

    def rotary_mul(self) -> RotaryMul:
        """The arithmetic in plain torch."""
        return ReferenceRotaryMul()

    def graph_runtime(self) -> GraphRuntime:
        """Calls instead of captures."""
        return EagerGraphRuntime()
