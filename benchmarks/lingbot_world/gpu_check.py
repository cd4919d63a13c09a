"""Measures on one GPU, within minutes, what this repository only counts; says it line by line.

``python -m benchmarks.lingbot_world.gpu_check --out gpu_check.jsonl`` needs torch 2.11 or newer,
numpy, tqdm, safetensors and jaxtyping, nothing else of what the package needs, and no checkpoint:
weights are random. Every part is fenced: what one raises is its own line, and the next one begins.
With ``--device cpu --scale tiny`` the same code runs anywhere.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

# First, since what follows imports pydantic.
from benchmarks.lingbot_world.absent import PYDANTIC_IS_ABSENT
from benchmarks.lingbot_world.bench_real import Scale, scale_of
from benchmarks.lingbot_world.bench_timing import environment, gpu_state
from benchmarks.lingbot_world.gpu_check_model import ModelChecks
from benchmarks.lingbot_world.gpu_check_same import SameResults
from vllm_omni.errors import OmniError
from vllm_omni.platforms import create_platform

_DEFAULT_MINUTES = 9.0
_FENCED = (RuntimeError, ValueError, TypeError, AssertionError, OSError, ImportError, OmniError)
"""What torch, its compiler and this package raise; a bug of the script ends it."""

_CHECKED: dict[str, object] = {"pydantic": not PYDANTIC_IS_ABSENT}


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement.

    Attributes:
        needs_s: seconds that it takes at full scale; it is left out when fewer are left.
        measure: returns what its line says.
    """

    name: str
    needs_s: float
    measure: Callable[[], object]


class Report:
    """Writes one JSON object for each line as soon as it is known.

    Args:
        limit_s: seconds after which no part begins.
    """

    def __init__(self, out: TextIO, limit_s: float) -> None:
        self._out = out
        self._started_s = time.monotonic()
        self._limit_s = limit_s

    def run(self, part: Part) -> None:
        """Measure a part, or say why there is no result."""
        left_s = self._limit_s - (time.monotonic() - self._started_s)
        if left_s < part.needs_s:
            self.tell(part.name, skipped=f"{left_s:.0f} s left, {part.needs_s:.0f} needed")
            return
        began_s = time.monotonic()
        try:
            result = part.measure()
        except _FENCED as error:
            reason = f"{type(error).__name__}: {str(error)[:2000]}"
            self.tell(part.name, error=reason, seconds=round(time.monotonic() - began_s, 2))
            return
        self.tell(part.name, result=result, seconds=round(time.monotonic() - began_s, 2))

    def tell(self, name: str, **facts: object) -> None:
        """Write a line, to the end of the disk's cache: the machine may go away."""
        self._out.write(json.dumps({"part": name, **facts}) + "\n")
        self._out.flush()


def parts_of(scale: Scale, device: torch.device, backend: str, compiler: str) -> Iterator[Part]:
    """Yield all parts, the ones that matter most first.

    Args:
        backend: name of the attention backend.
        compiler: backend of ``torch.compile``.
    """
    same = SameResults(device, backend, compiler)
    model = ModelChecks(scale, device, backend, compiler)
    yield Part("environment", 0, lambda: environment(device) | _CHECKED)
    yield Part("attention kernels", 10, model.attention_kernels)
    yield Part("same: float32", 5, lambda: same.compare(torch.float32))
    yield Part("same: bfloat16", 5, lambda: same.compare(torch.bfloat16))
    yield Part("same: leased", 5, lambda: same.compare(torch.bfloat16, leased=True))
    yield Part("same: compiled", 40, lambda: same.compare(torch.float32, compiled=True))
    yield Part("products", 5, lambda: model.bench.products())
    yield Part("layer, eager", 5, lambda: model.bench.layer())
    yield Part("chunks, eager", 45, lambda: model.bench.chunks())
    yield Part("decode, uint8, copy to host", 20, model.decode)
    yield Part("condition encode", 20, model.encode)
    yield Part("layer, compiled", 60, model.compiled_layer)
    yield Part("chunks, compiled", 45, lambda: model.bench.chunks())
    yield Part("loading weights", 15, model.loading)
    yield Part("memory against the plan", 1, model.memory)
    yield Part("clocks and power", 0, lambda: gpu_state() if device.type == "cuda" else None)


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    with Path(path).open("a", encoding="utf-8") as out:
        yield out


def main(words: list[str] | None = None) -> None:
    """Run every part that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", default="full", choices=("full", "tiny"))
    parser.add_argument("--minutes", type=float, default=_DEFAULT_MINUTES, help="time budget")
    parser.add_argument("--out", default="gpu_check.jsonl", help="file that lines are added to")
    parser.add_argument(
        "--compiler", default="inductor", help="backend of torch.compile; aot_eager to rehearse"
    )
    options = parser.parse_args(words)
    platform = create_platform(options.device)
    device = platform.device(0)
    scale = scale_of(options.scale)
    with _opened(options.out) as out, torch.inference_mode():
        report = Report(out, 60 * options.minutes)
        for part in parts_of(scale, device, "flash", options.compiler):
            needs_s = part.needs_s if options.scale == "full" else 0
            report.run(Part(part.name, needs_s, part.measure))


if __name__ == "__main__":
    main()
