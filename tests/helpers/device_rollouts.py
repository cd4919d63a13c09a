"""Rolls worlds out on a device and writes their latents to a file; a program of its own.

    python -m tests.helpers.device_rollouts CHECKPOINT FILE '{"device": "cuda"}' 64x96 32x48

The compiler and the shape checks of a test run exclude each other, and ranks are processes that
import the program again.
"""

import json
import sys
from dataclasses import replace

import numpy as np

from tests.helpers.tiny import tiny_prompt
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    OutputKind,
    PromptStep,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
)

CHUNKS = 5
SWITCH = 3


def request_of(geometry):
    keys = ((frozenset("w"), frozenset("l"), frozenset()),) * CHUNKS
    return SessionRequest(
        prompt=tiny_prompt("a road"), image=SourceImage(rgb=np.full((64, 96, 3), 90, np.uint8)),
        height=geometry.height, width=geometry.width, num_chunks=CHUNKS, seed=3,
        camera=ScriptedKeys(keys), output=OutputKind.LATENT, generator_device="cpu",
    )  # fmt: skip


def config_of(checkpoint, settings, sizes):
    degree = settings.pop("ulysses_degree", 1)
    config = OmniDiffusionConfig(
        model=checkpoint, geometry=sizes[0], max_num_seqs=len(sizes),
        executor="inline" if degree == 1 else "mp", **settings,
    )  # fmt: skip
    return replace(config, parallel=DiffusionParallelConfig(ulysses_degree=degree))


def roll(config, sizes):
    """Latents of each world; worlds take turns chunk by chunk, and the prompt changes."""
    executor = create_executor(config)
    executor.start()
    made = {str(size): [] for size in sizes}
    for size in sizes:
        executor.open_session(str(size), request_of(size))
    for index in range(CHUNKS):
        prompt = PromptStep(tiny_prompt("a river"), 0.5) if index == SWITCH else None
        for name, latents in made.items():
            plan = ChunkPlan(name, index, prompt=prompt)
            executor.run_chunk(plan, lambda r, kept=latents: kept.append(r.data.copy()))
    executor.shutdown()
    return {name: np.concatenate(latents, 1) for name, latents in made.items()}


def main():
    checkpoint, target, settings, *words = sys.argv[1:]
    sizes = [VideoGeometry(*map(int, word.split("x"))) for word in words]
    np.savez(target, **roll(config_of(checkpoint, json.loads(settings), sizes), sizes))


if __name__ == "__main__":
    main()
