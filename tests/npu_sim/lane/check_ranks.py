"""Ranks on simulated devices make the worlds of as many ranks on the CPU.

The executor starts one process for each device; they exchange over HCCL, decode columns of the
picture each and gather the pixels at the root. In late order every exchange that is not waited
for would change bytes.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.sessions import make_rollout, small_request
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_prompt
from tests.npu_sim.processes import TIMEOUT_S, environment
from vllm_omni import envs
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import OutputKind, PromptStep
from vllm_omni.diffusion.models.lingbot_world.pixel_output import PixelMode
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath

pytestmark = [
    pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.npu,
    pytest.mark.timeout(TIMEOUT_S),
]  # fmt: skip

RANKS = 4
CHUNKS = {OutputKind.LATENT: 4, OutputKind.UINT8: 2}
"""The tiny window of nine latent frames rolls in the fourth chunk."""
PROMPTS = {2: PromptStep(tiny_prompt("a frozen lake"), 1.0)}
GRAPHS = 2 * 3
"""Two slots for each layer of the tiny model, on each rank."""


def worlds(device_type: str, order: str, chunks=CHUNKS, **changes) -> list[list[np.ndarray]]:
    """The same world in several kinds of output, its noise drawn on the host."""
    ranks = changes.setdefault("parallel", DiffusionParallelConfig(ulysses_degree=RANKS)).world_size
    config = OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), device=device_type, dtype="bfloat16", executor="mp",
        geometry=VideoGeometry(64, 96), chunk_timeout_s=float(TIMEOUT_S),
        devices=None if device_type == "cpu" else ",".join(map(str, range(ranks))), **changes,
    )  # fmt: skip
    with envs.exported(environment(ranks, order=order, vae_path=ConvPath.STACKED)):
        executor = MultiprocExecutor(config)
        executor.start()
        try:
            return [
                make_rollout(
                    executor,
                    replace(small_request(num_chunks=number, output=kind), generator_device="cpu"),
                    prompts=PROMPTS,
                )
                for kind, number in chunks.items()
            ]
        finally:
            executor.shutdown()


@pytest.fixture(scope="module")
def on_host():
    return worlds("cpu", "eager")


@pytest.mark.parametrize("order", ["eager", "deferred"])
def test_four_devices_make_the_bytes_of_four_processes_on_the_cpu(on_host, order):
    """Bitwise, latents and pixels."""
    assert same_worlds(worlds("npu", order), on_host)


def test_four_ranks_over_leased_graphs_make_the_bytes_of_four_without(on_host, capfd, caplog):
    """Bitwise, in late order; every rank captured, and no session did without.

    The exchange that brings the attention back writes over HCCL into a slot's buffer, and the next
    replay reads it.
    """
    caplog.set_level(logging.INFO, logger="vllm_omni")  # which the ranks inherit
    capfd.readouterr()
    made = worlds("npu", "deferred", leased_post_attention=True)
    log = capfd.readouterr().err
    assert log.count(f"captured {GRAPHS} post-attention graphs") == RANKS
    assert log.count("with the npu runtime") == RANKS
    assert "runs without post-attention graphs" not in log
    assert same_worlds(made, on_host)


TWO = {"parallel": DiffusionParallelConfig(ulysses_degree=2)}
PIXELS = {OutputKind.UINT8: 2, OutputKind.FLOAT: 2}


@pytest.fixture(scope="module")
def pixels_on_host():
    return worlds("cpu", "eager", PIXELS, **TWO)


@pytest.mark.parametrize("mode", PixelMode)
def test_every_way_of_the_pixels_to_the_root_brings_the_same(pixels_on_host, mode):
    """Bitwise, as bytes and as floats, in late order."""
    made = worlds("npu", "deferred", PIXELS, pixel_output_mode=mode, **TWO)
    assert same_worlds(made, pixels_on_host)


def same_worlds(made: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> bool:
    for here, there in zip(made, expected, strict=True):
        assert [len(chunk) for chunk in here] == [len(chunk) for chunk in there]
    pairs = zip(made, expected, strict=True)
    return all(np.array_equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
