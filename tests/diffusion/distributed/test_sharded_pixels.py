"""Pixels of several ranks, through the whole pipeline: shares of the decode, modes, failures."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.mark import advanced
from tests.helpers.rollouts import RankRollout, roll
from tests.helpers.tiny import tiny_config
from tests.helpers.vae_builders import tiny_vae
from tests.helpers.watched_rollouts import WATCHED_CHUNKS, roll_watched
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.diffusion.models.lingbot_world.pixel_output import PixelMode
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import CausalConv3d
from vllm_omni.diffusion.models.lingbot_world.vae.layers import Downsampler

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

TWO, FOUR = (DiffusionParallelConfig(ulysses_degree=ranks) for ranks in (2, 4))
EVEN, ODD = VideoGeometry(64, 96), VideoGeometry(64, 112)
"""Twelve latent columns on two or four ranks; fourteen on four, of which the last has two."""
CHUNKS = 4


def on_ranks(function, parallel: DiffusionParallelConfig, size: VideoGeometry, *arguments):
    config = tiny_config("mp", parallel=parallel, geometry=size)
    return run_ranks(function, config, *arguments, parallel=parallel)


def roll_in_modes(state: ParallelState, config, output: OutputKind) -> dict[str, RankRollout]:
    return {
        mode.value: roll(state, replace(config, pixel_output_mode=mode.value), output, CHUNKS)
        for mode in PixelMode
    }


@pytest.mark.parametrize(
    ("parallel", "size"),
    [(TWO, EVEN), advanced(FOUR, EVEN), advanced(FOUR, ODD)],
)
def test_modes_agree_chunk_after_chunk(parallel, size):
    """Bitwise between modes; against one rank bitwise for even shares, else one level apart."""
    expected = roll(ParallelState(), tiny_config(geometry=size), OutputKind.UINT8, CHUNKS)
    made = on_ranks(roll_in_modes, parallel, size, OutputKind.UINT8)
    assert [len(chunk) for chunk in expected.outputs] == [9, 12, 12, 12]
    native = made[0]["native"].outputs
    for mode, rollout in made[0].items():
        for chunk, other, single in zip(rollout.outputs, native, expected.outputs, strict=True):
            assert torch.equal(chunk, other), mode
            apart = (chunk.int() - single.int()).abs().max().item()
            assert apart <= (0 if size is EVEN else 1), mode
    for rank in made[1:]:
        assert all(rollout.outputs == [] for rollout in rank.values())


@pytest.mark.parametrize(
    ("parallel", "size", "tolerance"),
    [advanced(TWO, EVEN, 0.0), advanced(FOUR, EVEN, 0.0), advanced(FOUR, ODD, 2e-6)],
)
def test_float_pixels(parallel, size, tolerance):
    """Bitwise for even shares; odd shares change the width that kernels see: 2e-6."""
    expected = roll(ParallelState(), tiny_config(geometry=size), OutputKind.FLOAT, CHUNKS)
    made = on_ranks(roll, parallel, size, OutputKind.FLOAT, CHUNKS)
    for chunk, single in zip(made[0].outputs, expected.outputs, strict=True):
        torch.testing.assert_close(chunk, single, rtol=0, atol=tolerance)


@pytest.mark.advanced_model
def test_whole_frames_on_the_root_alone_when_sharding_is_off():
    # Bitwise: nothing of the decode is exchanged.
    config = replace(tiny_config("mp", parallel=TWO, geometry=ODD), vae_spatial_sharding=False)
    expected = roll(ParallelState(), tiny_config(geometry=ODD), OutputKind.UINT8, CHUNKS)
    made = run_ranks(roll_watched, config, OutputKind.UINT8, parallel=TWO)
    for chunk, single in zip(made[0].rollout.outputs, expected.outputs, strict=False):
        assert torch.equal(chunk, single)
    assert made[1].rollout.outputs == []
    assert all("batch_isend_irecv" not in watched.sent for watched in made)
    states = run_ranks(decoder_states, config_of_even_size(), parallel=TWO)
    assert [decodes for decodes, _, _ in states] == [True, False]
    assert states[1][1:] == (0, 0)
    assert states[0][1] == states[0][2] > 0


def config_of_even_size():
    return replace(tiny_config("mp", parallel=TWO, geometry=EVEN), vae_spatial_sharding=False)


def decoder_states(state: ParallelState, config) -> tuple[bool, int, int]:
    """Whether a session of this rank has decoder state, and what it and the pool count for it."""
    from tests.helpers.sessions import small_request
    from vllm_omni.diffusion.messages import ChunkPlan
    from vllm_omni.diffusion.worker.worker import Worker

    worker = Worker(config, local_rank=state.control.rank, parallel=state)
    worker.open_session("a", small_request())
    worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    decoder = worker.sessions["a"].committed.decoder
    held = 0 if decoder is None else decoder.bytes()
    return decoder is not None, held, worker.pipeline.model.output.decoder_bytes(EVEN)


@pytest.mark.advanced_model
def test_only_the_roots_group_decodes():
    parallel = DiffusionParallelConfig(tensor_parallel_size=2, ulysses_degree=2)
    whole = decoder_states(ParallelState(), tiny_config(geometry=EVEN))
    made = on_ranks(decoder_states, parallel, EVEN)
    # Ranks 0 and 2 share the root's replica of the tokens, 1 and 3 the other.
    assert [decodes for decodes, _, _ in made] == [True, False, True, False]
    for _, held, counted in (whole, *made):
        assert held == counted
    assert made[0][1] + made[2][1] == whole[1]


def test_exchanges_of_decode_and_condition_are_counted():
    encoder = tiny_vae().encoder
    borders = sum(isinstance(part, CausalConv3d | Downsampler) for part in encoder.modules())
    made = on_ranks(roll_watched, TWO, EVEN, OutputKind.UINT8)
    latents = on_ranks(roll_watched, TWO, EVEN, OutputKind.LATENT)
    for with_pixels, without in zip(made, latents, strict=True):
        assert with_pixels.rollout.traffic.total.calls == without.rollout.traffic.total.calls
        assert with_pixels.sent["all_to_all_single"] == without.sent["all_to_all_single"]
        assert with_pixels.sent["all_reduce"] == without.sent["all_reduce"]
        # Per chunk: the middle attention of three latent frames, and the pixels once.
        extra = len(with_pixels.sent["gather"]) - len(without.sent["gather"])
        assert extra == WATCHED_CHUNKS * (3 + 1)
        # For each latent frame of a condition, which ranks share: a batch for each 3x3 convolution.
        # The last chunk makes no condition ahead.
        conditions = WATCHED_CHUNKS * LATENT_FRAMES_PER_CHUNK
        assert len(without.sent["batch_isend_irecv"]) == conditions * borders
        assert len(with_pixels.sent["batch_isend_irecv"]) > conditions * borders
