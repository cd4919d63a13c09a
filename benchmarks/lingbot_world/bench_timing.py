"""Clocks for a device, and what must be said beside every figure."""

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

_WARM_UPS = 2


class Clock:
    """Times work on one device: events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        """Milliseconds of one run; returns when the device has done it."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Median milliseconds of ``repeats`` runs after two that do not count."""
        for _ in range(_WARM_UPS):
            self.once(work)
        return statistics.median(self.once(work) for _ in range(repeats))


def environment(device: torch.device) -> dict[str, object]:
    """Hardware, software and commit of a run."""
    folder = str(Path(__file__).parent)
    facts: dict[str, object] = {
        "device": device.type,
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _output("git", "-C", folder, "describe", "--always", "--dirty"),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["gpu_state"] = gpu_state()
    return facts


def gpu_state() -> str | None:
    """Clocks, power and temperature now, ``None`` where nvidia-smi is not there."""
    fields = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors held at once on a GPU; largest resident size of a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
