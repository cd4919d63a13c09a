"""One rank holds the text encoder for all, where memory wants it."""

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.model_builders import tiny_worker
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.models.interface import memory_needs
from vllm_omni.diffusion.models.lingbot_world import load
from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder
from vllm_omni.platforms.cpu import CpuPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")
PROMPTS = [(token, 1) for token in (4, 5, 4, 6, 7, 8, 4)]
"""Tokens of each."""


def embedded(state: ParallelState, dtype: torch.dtype) -> tuple[bool, list[torch.Tensor]]:
    model = tiny_checkpoint_dir()
    facts = load.read_checkpoint(model, tiny_config().kv_cache)
    prompts = load.load_prompts(model, facts.transformer, state, dtype=dtype, device=CPU)
    prompts.prepare(PROMPTS[0])
    return prompts.encoder is not None, [prompts.embed(prompt) for prompt in PROMPTS]


@pytest.mark.parallel
def test_ranks_without_the_encoder_get_the_bytes_of_the_root():
    """Bitwise, also when an embedding has been dropped and is asked for again."""
    dtype = torch.bfloat16
    alone = TextEncoder.load(tiny_checkpoint_dir(), dtype=dtype, device=CPU)
    made = run_ranks(embedded, dtype, parallel=DiffusionParallelConfig(ulysses_degree=2))
    assert [has_encoder for has_encoder, _ in made] == [True, False]
    with torch.inference_mode():
        wanted = [alone.embed(prompt) for prompt in PROMPTS]
    for _, embeddings in made:
        assert all(map(torch.equal, embeddings, wanted))


class Accelerator(CpuPlatform):
    pool_from_free_memory = True

    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self, device: torch.device) -> int:  # noqa: ARG002
        return self.free


@pytest.mark.parametrize(
    ("setting", "spare", "moved"),
    [("auto", 0, True), ("auto", -1, False), ("device", -1, True), ("cpu", 10**9, False)],
)
def test_the_encoder_goes_to_the_device_where_a_world_fits_beside_it(
    setting, spare, moved, monkeypatch, caplog
):
    pipeline = tiny_worker().pipeline
    config = tiny_config(text_encoder_device=setting)
    needed = memory_needs(pipeline, config.prepared_geometry).total
    platform = Accelerator(needed + pipeline.model.text.num_bytes + spare)
    moves = []
    monkeypatch.setattr(TextEncoder, "move", lambda _, device: moves.append(device))
    load.place_text_encoder(config, pipeline, platform)
    assert moves == ([CPU] if moved else [])
    said = "the text encoder" in caplog.text and "works on the host" in caplog.text
    assert said == (setting == "auto" and not moved)
