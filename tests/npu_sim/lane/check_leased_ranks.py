"""Four ranks replay leased graphs on four simulated devices: the worlds of four on the CPU.

The exchange that brings the attention back writes over HCCL into a slot's buffer, and the next
replay reads it: in late order an exchange that is not waited for changes bytes.
"""

import logging

import pytest

from tests.npu_sim.lane.check_ranks import RANKS, same_worlds, worlds
from tests.npu_sim.processes import TIMEOUT_S
from vllm_omni.diffusion.messages import OutputKind

pytestmark = [
    pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.npu,
    pytest.mark.timeout(TIMEOUT_S),
]  # fmt: skip

CHUNKS = {OutputKind.LATENT: 4, OutputKind.UINT8: 2}
"""The tiny window rolls in the fourth chunk; its prompt moves in the third."""
GRAPHS = 2 * 3
"""Of the tiny model's layers, on each rank."""


def test_four_ranks_over_graphs_make_the_bytes_of_four_without_on_the_cpu(capfd, caplog):
    """Bitwise, latents and pixels, in late order; every rank captured, no session did without."""
    caplog.set_level(logging.INFO, logger="vllm_omni")  # which the ranks inherit
    expected = worlds("cpu", "eager", CHUNKS)
    capfd.readouterr()
    made = worlds("npu", "deferred", CHUNKS, leased_post_attention=True)
    log = capfd.readouterr().err
    assert log.count(f"captured {GRAPHS} post-attention graphs") == RANKS
    assert log.count("with the npu runtime") == RANKS
    assert "runs without post-attention graphs" not in log
    assert same_worlds(made, expected)
