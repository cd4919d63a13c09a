"""Small session requests and the chunks that an executor makes of them."""

import numpy as np

from tests.helpers.tiny import tiny_prompt
from vllm_omni.diffusion.executor import Executor
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    OutputKind,
    PromptStep,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
)
from vllm_omni.diffusion.worker.worker import Worker

KEYS = ("w", "wj", "d", "si", "", "wl", "a", "wk")
"""Keys held in chunk after chunk; the camera never repeats itself within the window."""


def small_request(
    *,
    num_chunks: int = 7,
    seed: int = 1,
    height: int = 64,
    width: int = 96,
    output: OutputKind = OutputKind.UINT8,
    prompt: str = "a castle on a hill, morning light",
) -> SessionRequest:
    """A request that the tiny checkpoint answers in well under a second per chunk."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    keys = tuple((frozenset(KEYS[chunk % len(KEYS)]),) * 3 for chunk in range(num_chunks))
    return SessionRequest(
        prompt=tiny_prompt(prompt),
        image=SourceImage(rgb=noise),
        height=height,
        width=width,
        num_chunks=num_chunks,
        seed=seed,
        camera=ScriptedKeys(keys),
        output=output,
    )


def make_chunks(
    executor: Executor | Worker,
    session_id: str,
    indices: range,
    prompts: dict[int, PromptStep] | None = None,
) -> list[ChunkResult]:
    """Run chunks of an open session; the prompt moves where ``prompts`` says."""
    made: list[ChunkResult] = []
    for index in indices:
        step = None if prompts is None else prompts.get(index)
        executor.run_chunk(ChunkPlan(session_id, index, prompt=step), made.append)
    return made


def make_rollout(
    executor: Executor | Worker,
    request: SessionRequest,
    *,
    session_id: str = "rollout",
    prompts: dict[int, PromptStep] | None = None,
) -> list[np.ndarray]:
    """Open, run all chunks, close; the data of every chunk."""
    assert request.num_chunks is not None
    executor.open_session(session_id, request)
    made = make_chunks(executor, session_id, range(request.num_chunks), prompts)
    executor.close_session(session_id)
    return [chunk.data for chunk in made]
