"""Two ranks make the bits of one where their activations fill whole vectors, else nearly.

torch computes GELU and SiLU vector by vector and what is left over one by one, with another last
bit. A rank's share of the tokens may end elsewhere inside a vector than all tokens do.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.distributed import run_ranks
from tests.helpers.model_builders import ModelRollout, small_transformer, windowed
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

SIZE = VideoGeometry(32, 112)
"""Two rows of seven tokens, of which each rank has seven: 21 in the three frames of a chunk."""
CHUNKS = 4
WHOLE, BROKEN = 128, 112
"""Feed-forward widths: 21 rows are 84 times 32 elements, or 73.5 times."""


def model_of(ffn_dim: int) -> LingBotWorldConfig:
    return windowed(3, 9, ffn_dim=ffn_dim, num_attention_heads=4, attention_head_dim=24)


def flows(state: ParallelState, config: LingBotWorldConfig) -> list[Tensor]:
    """Flows of a rank over the roll of the window."""
    made = []
    with torch.inference_mode():
        rollout = ModelRollout(small_transformer(config, parallel=state), geometry=SIZE)
        for chunk in range(CHUNKS):
            made.append(rollout.probe(chunk).clone())
            rollout.commit(chunk)
    return made


def on_one_and_two_ranks(ffn_dim: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    config = model_of(ffn_dim)
    two = DiffusionParallelConfig(ulysses_degree=2)
    return flows(ParallelState(), config), run_ranks(flows, config, parallel=two)


def tokens(ranks: int) -> int:
    return LATENT_FRAMES_PER_CHUNK * SIZE.tokens_per_frame // ranks


def tails_differ(width: int) -> bool:
    """Whether this processor's GELU makes other bits of the tail of a rank's share."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(tokens(1) * width, generator=generator)
    share = whole[: tokens(2) * width].clone()
    activated = F.gelu(whole, approximate="tanh")[: len(share)]
    return not torch.equal(F.gelu(share, approximate="tanh"), activated)


def test_widths_of_whole_vectors_are_bitwise():
    assert tokens(2) * WHOLE % 32 == 0
    assert not tails_differ(WHOLE)
    expected, made = on_one_and_two_ranks(WHOLE)
    for rank in made:
        for flow, single in zip(rank, expected, strict=True):
            assert torch.equal(flow, single)


def test_other_widths_are_near_and_not_bitwise():
    """Within 1e-5 of one rank (2e-6 is seen), and different where the processor's tails are."""
    assert tokens(2) * BROKEN % 32 != 0
    expected, made = on_one_and_two_ranks(BROKEN)
    for rank in made:
        for flow, single in zip(rank, expected, strict=True):
            torch.testing.assert_close(flow, single, rtol=0, atol=1e-5)
    equal = all(torch.equal(a, b) for rank in made for a, b in zip(rank, expected, strict=True))
    assert equal is not tails_differ(BROKEN)
