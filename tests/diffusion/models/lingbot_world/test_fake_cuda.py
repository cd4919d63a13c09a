"""What a rollout on device ``cuda`` copies, and that nothing in it waits for the device.

The program of ``tests/helpers/fake_cuda.py`` refuses operands on two devices and copies that wait.
"""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.helpers.blocks import tiny_transformer_config
from tests.helpers.fake_cuda import CHUNKS, FIXED
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.attention.sdpa import SdpaAttention
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import GeluLinearMethod, PlainLinearMethod
from vllm_omni.diffusion.layers.rope import BROADCAST
from vllm_omni.diffusion.models.lingbot_world import load
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.platforms.cuda import CudaPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(scope="module")
def counted():
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fake_cuda", str(tiny_checkpoint_dir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_chunk_uploads_eight_tensors_at_most_and_downloads_its_pixels(counted):
    """The window grows, rolls, and the prompt changes in between."""
    opening, *chunks = counted
    assert len(chunks) == CHUNKS
    assert "downloads" not in opening
    for chunk in chunks:
        assert 1 <= chunk["uploads"] <= 8
        assert chunk["downloads"] == 1


def test_only_the_search_for_the_fixed_condition_asks_the_device(counted):
    """From then on no chunk waits for anything but its pixels."""
    comparisons = [chunk.get("comparisons", 0) for chunk in counted]
    assert all(comparisons[2 : FIXED + 2])
    assert not any(comparisons[FIXED + 2 :])


@pytest.mark.parametrize("given", [True, False])
def test_a_given_method_multiplies_on_a_gpu_too(monkeypatch, given):
    """Whoever stores the weights of the feed-forward part in a way of his own multiplies them."""
    monkeypatch.setattr(load, "checked_backend", lambda *_, **__: (SdpaAttention(), "none"))
    monkeypatch.setattr(load, "checked_rotary", lambda *_, **__: BROADCAST)
    method = PlainLinearMethod() if given else None
    parts = load.layer_parts(
        OmniDiffusionConfig(model="", device="cuda", enforce_eager=True), CudaPlatform(),
        model=tiny_transformer_config(), device=torch.device("cuda", 0),
        parallel=ParallelState(), feed_forward=method,
    )  # fmt: skip
    with torch.device("meta"):
        first, activation, last = LingBotWorldBlock(parts).ffn
    if given:
        assert first.method is last.method is method
        assert isinstance(activation, nn.GELU)
    else:
        assert isinstance(first.method, GeluLinearMethod)
        assert isinstance(activation, nn.Identity)
