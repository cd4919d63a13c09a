"""Rollouts of one rank with everything that its sessions hold, for comparisons between worlds."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.helpers.kv_window import chronological
from tests.helpers.sessions import small_request
from tests.helpers.tiny import tiny_prompt
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic, ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.messages import ChunkPlan, OutputKind, PromptStep
from vllm_omni.diffusion.worker.worker import Worker

NUM_CHUNKS = 8
"""The tiny window of nine latent frames is full after three chunks and rolls from then on."""
PROMPTS = {
    3: PromptStep(tiny_prompt("a frozen lake"), 0.5),
    4: PromptStep(tiny_prompt("a frozen lake"), 1.0),
}


@dataclass
class RankRollout:
    """What one rank handed out and what its session held at the end.

    Attributes:
        outputs: of each chunk; empty on ranks that hand out nothing.
        window: keys and values of each layer, oldest latent frame first.
        text: keys and values of the prompt, of each layer.
    """

    outputs: list[Tensor] = field(default_factory=list)
    window: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    text: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    traffic: ExchangeTraffic = field(default_factory=ExchangeTraffic)
    free_pages: int = 0


def roll(
    state: ParallelState,
    config: OmniDiffusionConfig,
    output: OutputKind = OutputKind.LATENT,
    num_chunks: int = NUM_CHUNKS,
) -> RankRollout:
    """One session from open to close on a fresh worker, with a prompt that moves."""
    assert config.geometry is not None
    size = {"height": config.geometry.height, "width": config.geometry.width}
    worker = Worker(config, local_rank=state.control.rank, parallel=state)
    worker.open_session("a", small_request(num_chunks=num_chunks, output=output, **size))
    session = worker.sessions["a"]
    made = RankRollout()
    for index in range(num_chunks):
        plan = ChunkPlan("a", index, prompt=PROMPTS.get(index))
        worker.run_chunk(plan, lambda chunk: made.outputs.append(torch.from_numpy(chunk.data)))
    frames = num_chunks * LATENT_FRAMES_PER_CHUNK
    layers = range(worker.pool.spec.num_layers)
    made.window = [chronological(session.kv, layer, frames) for layer in layers]
    made.text = [(kv.key.clone(), kv.value.clone()) for kv in session.committed.text.kv]
    made.traffic = worker.pipeline.traffic
    worker.close_session("a")
    made.free_pages = worker.pool.pages.num_free
    worker.shutdown()
    return made
