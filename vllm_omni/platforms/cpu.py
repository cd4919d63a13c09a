"""The CPU platform, for development, tests and the demo."""

import os
import resource
from pathlib import Path

import torch
from typing_extensions import override

from vllm_omni.platforms.base import Int8Ops, Platform, RotaryMul
from vllm_omni.platforms.graphs import GraphRuntime
from vllm_omni.platforms.laps import LapClock

_KIB = 1024
_MEMINFO = Path("/proc/meminfo")


class CpuPlatform(Platform):
    """Runs in host memory, with gloo and torch's scaled dot-product attention."""

    name = "cpu"
    collective_backend = "gloo"
    attention_backend = "sdpa"
    pool_from_free_memory = False

    @override
    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    @override
    def free_bytes(self, device: torch.device) -> int:
        """Count free pages and, on Linux, caches that would give way."""
        if _MEMINFO.is_file():
            for line in _MEMINFO.read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * _KIB
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @override
    def peak_bytes(self, device: torch.device) -> int:
        """Return the largest resident size of this process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    @override
    def synchronize(self, device: torch.device) -> None:
        del device  # nothing is queued

    @override
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @override
    def completion_event(self, device: torch.device) -> None:
        del device  # exchanges end when their call returns

    @override
    def lap_clock(self, device: torch.device) -> LapClock:
        return LapClock()

    @override
    def int8_ops(self) -> Int8Ops:
        return Int8Ops()

    @override
    def rotary_mul(self) -> RotaryMul:
        return RotaryMul()

    @override
    def graph_runtime(self) -> GraphRuntime:
        return GraphRuntime()
