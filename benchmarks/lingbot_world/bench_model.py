"""Measure the model without a server, as JSON.

    python -m benchmarks.lingbot_world.bench_model
    python -m benchmarks.lingbot_world.bench_model --device cuda --real-shapes
    python -m benchmarks.lingbot_world.bench_model --real-shapes --scale tiny
    python -m benchmarks.lingbot_world.bench_model --ulysses-degree 2

Without ``--real-shapes``: the tiny checkpoint (chunk time by part, attention, the two decode paths,
conversion to bytes) and what fresh processes cost. With it: random weights in the real model's
shapes, each figure beside the practical bound of ``roofline.py``. With ``--ulysses-degree``: the
tiny checkpoint on several ranks, its exchanges and their bytes beside the formula.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.lingbot_world.bench_host import first_chunk, import_costs
from benchmarks.lingbot_world.bench_ranks import ranks_run
from benchmarks.lingbot_world.bench_real import real_shapes, scale_of
from benchmarks.lingbot_world.bench_small import small_run
from benchmarks.lingbot_world.bench_timing import environment
from benchmarks.lingbot_world.roofline_devices import DEVICES
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.tools.tiny_checkpoint import write_tiny_checkpoint


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lingbot_world.bench_model",
        description=(__doc__ or "").splitlines()[0],
    )
    names = [device.name for device in DEVICES]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU")
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny one, made anew)")
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per figure")
    parser.add_argument("--no-processes", action="store_true", help="leave fresh processes out")
    parser.add_argument("--ulysses-degree", type=int, default=1, help="measure exchanges of ranks")
    parser.add_argument("--real-shapes", action="store_true")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--bound-device", choices=names, help="rates of the bounds (cuda: H200)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run what was asked for."""
    torch.set_num_threads(options.threads)
    result: dict[str, object] = {
        "command": "python -m benchmarks.lingbot_world.bench_model " + " ".join(sys.argv[1:]),
        "environment": environment(torch.device(options.device)),
    }
    if options.real_shapes:
        bound = options.bound_device or (names_of_cuda() if options.device == "cuda" else None)
        shapes = real_shapes(scale_of(options.scale), options.device, bound)
        return result | {"real_shapes": shapes}
    with tempfile.TemporaryDirectory(prefix="bench-model-") as scratch:
        model = options.model or write_tiny_checkpoint(Path(scratch) / "tiny")
        geometry = VideoGeometry(options.height, options.width)
        if options.ulysses_degree > 1:
            ranks = ranks_run(
                model, geometry, options.device, options.chunks, options.ulysses_degree
            )
            return result | {"ranks": ranks}
        if not options.no_processes:
            result["imports"] = import_costs(options.repeats)
            result["first_chunk"] = first_chunk(model, height=64, width=96, repeats=options.repeats)
        result["small"] = small_run(model, geometry, options.device, options.chunks)
    return result


def names_of_cuda() -> str | None:
    """The device in the table of rates that this GPU is, if any."""
    gpu = torch.cuda.get_device_name()
    return next((device.name for device in DEVICES if device.name in gpu), None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object."""
    options = parse_arguments(arguments)
    text = json.dumps(measure(options), indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
