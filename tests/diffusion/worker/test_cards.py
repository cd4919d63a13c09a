"""The recipe's table of cards is the plan of memory at the real shapes."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.lingbot_world.bench_real import scale_of
from benchmarks.lingbot_world.roofline import TEXT_ENCODER_PARAMETERS
from tests.helpers.model_builders import small_config, transformer_parts
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState, RankGroup
from vllm_omni.diffusion.models.interface import memory_needs
from vllm_omni.diffusion.models.lingbot_world import load
from vllm_omni.diffusion.models.lingbot_world.pipeline import (
    LingBotWorldCausalDMDPipeline,
    LoadedModel,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.text import Prompts
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.platforms.cpu import CpuPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

META = torch.device("meta")
GIB = 2**30
USABLE_GIB, VAE_AND_CUDA_GIB = {"80": 79, "141": 139}, 0.8
RECIPE = Path(__file__).parents[3] / "docs/recipes/lingbot_world_v2.md"
ROW = (
    r"\| (\d) x (\d+) GB(?:, each)? \| (\S+) \| (\S+) \| on the (host|card)[^|]*"
    r"\| (\d+(?:\.\d)?)[^|]*\|"
)


class Card(CpuPlatform):
    pool_from_free_memory = True

    def __init__(self, free: float) -> None:
        self.free = int(free)

    def free_bytes(self, device: torch.device) -> int:  # noqa: ARG002
        return self.free


class HostPrompts(Prompts):
    """Stands for UMT5 on the host, and notes where it is moved."""

    def __init__(self) -> None:
        super().__init__(None, SINGLE, text_dim=1, dtype=torch.bfloat16, device=META)
        self.encoder, self.moved_to = self, None

    @property
    def num_bytes(self) -> int:
        return 2 * TEXT_ENCODER_PARAMETERS

    def move(self, device: torch.device) -> None:
        self.moved_to = device


@cache
def real_model(ranks: int) -> LoadedModel:
    scale = scale_of("full")
    group = RankGroup(0, ranks, None)
    parallel = ParallelState(sequence=group, control=group) if ranks > 1 else ParallelState()
    with META:
        parts = transformer_parts(scale.transformer, dtype=torch.bfloat16, parallel=parallel)
        transformer = CausalLingBotWorldTransformer3DModel(parts)
        vae = WanVAE(scale.vae).to(torch.bfloat16)
    vae.prepare()
    gather = load.pixel_gather(small_config(), CpuPlatform(), parallel, META)
    return LoadedModel(
        text=HostPrompts(), transformer=transformer, vae=vae,
        output=ChunkOutput(vae, parallel, gather), flow_shift=5.0, device=META,
    )  # fmt: skip


@pytest.mark.parametrize("row", re.findall(ROW, RECIPE.read_text()), ids=" ".join)
def test_a_card_holds_what_the_recipe_says(row):
    ranks, card, weights, world, place, left = row
    model = real_model(int(ranks))
    config = small_config(geometry=scale_of("full").geometry)
    pipeline = LingBotWorldCausalDMDPipeline(config, model, Card(0))
    held = sum(p.numel() * p.element_size() for p in model.transformer.parameters())
    needs = memory_needs(pipeline, config.prepared_geometry).total
    assert (f"{held / GIB:.1f}", f"{needs / GIB:.1f}") == (weights, world)
    free = (USABLE_GIB[card] - VAE_AND_CUDA_GIB) * GIB - held
    model.text.moved_to = None
    load.place_text_encoder(config, pipeline, Card(free))
    on_card = model.text.moved_to == META
    assert on_card == (place == "card")
    spare = (free - on_card * model.text.num_bytes - needs) / GIB
    assert spare == pytest.approx(float(left), abs=0.6 if "." not in left else 0.06)


def test_the_recipe_has_four_kinds_of_machines():
    assert len(re.findall(ROW, RECIPE.read_text())) == 4
