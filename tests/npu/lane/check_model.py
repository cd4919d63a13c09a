"""The whole model on the Python device: placement, bytes, calls and transfers of every chunk."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.sessions import small_request
from tests.helpers.tiny import tiny_checkpoint_dir
from tests.npu import operators, python_device, standin
from tests.npu.lane.device import device, operator_calls, platform
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, OutputKind, PromptStep
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import ConfigError

__all__ = ["device", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CHUNKS = 4
"""The tiny window of nine latent frames rolls in the last one."""
LAYERS = 3
ATTENTIONS = 4 * 2 * LAYERS + 2 * (LAYERS - 1)
"""Self and cross-attention of four probes, and of a commit whose last layer only writes."""
TO_DEVICE = Counter(noise=4, rays=2, rotary=2)
"""Copies to the device in a chunk when the noise is drawn on the host."""


def config(device_type: str, **changes) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), device=device_type, dtype="bfloat16",
        geometry=VideoGeometry(64, 96), **changes,
    )  # fmt: skip


def rollout(settings, kind=OutputKind.UINT8, spent=None):
    """All chunks of a world whose noise is drawn on the host and whose prompt changes once."""
    worker, made = Worker(settings), []
    request = replace(small_request(num_chunks=CHUNKS, output=kind), generator_device="cpu")
    worker.open_session("world", request)
    for index in range(CHUNKS):
        python_device.transfers.clear()
        prompt = PromptStep("a frozen lake", 1.0) if index == 2 else None
        worker.run_chunk(ChunkPlan("world", index, prompt=prompt), made.append)
        if spent is not None:
            spent.append(Counter(python_device.transfers))
    worker.close_session("world")
    worker.shutdown()
    return [chunk.data for chunk in made]


@cache
def plain_host_latents():
    return rollout(config("cpu"), OutputKind.LATENT)


@pytest.mark.usefixtures("platform")
def test_latents_are_those_of_the_cpu(monkeypatch):
    """Bitwise: same kernels on the same values; the VAE's path is set to the CPU's."""
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
    here = rollout(config("npu"), OutputKind.LATENT)
    there = plain_host_latents()
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.usefixtures("platform")
def test_a_chunk_moves_its_pixels_and_nothing_else_to_the_host():
    spent: list[Counter] = []
    standin.calls.clear()
    pixels = rollout(config("npu"), spent=spent)
    assert [len(chunk) for chunk in pixels] == [9] + [12] * (CHUNKS - 1)
    attentions = operator_calls("npu_fusion_attention")
    # Two calls are the check at the start.
    assert len(attentions) == 2 + CHUNKS * ATTENTIONS
    assert {call.arguments["query"].device.type for call in attentions} == {"npu"}
    assert {call.arguments["query"].dtype for call in attentions} == {torch.bfloat16}
    for index, counts in enumerate(spent):
        assert counts["to_host"] == 1
        # Chunk 2 brings a prompt: token ids and mask.
        assert counts["to_device"] == sum(TO_DEVICE.values()) + 2 * (index == 2)
        # The condition's history is compared with the last one until it repeats, and the text
        # encoder looks at its mask; no layer of the transformer reads anything.
        assert counts["read_back"] <= 2 + (index == 2)


@pytest.mark.usefixtures("platform")
def test_an_unknown_attention_result_is_refused_before_serving(monkeypatch):
    right = operators.BODIES["npu_fusion_attention"]

    def without_scale(*args, **kwargs):
        return right(*args, **kwargs | {"scale": 1.0})

    monkeypatch.setitem(operators.BODIES, "npu_fusion_attention", without_scale)
    with pytest.raises(ConfigError, match="attention backend npu_fusion is wrong on npu:0"):
        Worker(config("npu"))


@pytest.mark.usefixtures("platform")
def test_the_fused_rotary_operator_runs_behind_its_switch(monkeypatch):
    """Bitwise: its body rounds every product, as torch's own operators do."""
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
    standin.calls.clear()
    here = rollout(config("npu", npu_rotary_mul=True), OutputKind.LATENT)
    assert all(np.array_equal(a, b) for a, b in zip(here, plain_host_latents(), strict=True))
    check, *calls = operator_calls("npu_rotary_mul")
    # A query and a key in each layer of four probes and a commit, whose last layer has keys alone.
    assert len(calls) == CHUNKS * (2 * 5 * LAYERS - 1)
    for call in (check, *calls):
        given = call.arguments
        assert (given["rotary_mode"], given["rotate"]) == ("interleave", None)
        assert {given[name].device.type for name in ("input", "r1", "r2")} == {"npu"}
    tokens, heads, channels = 3 * 24, 4, 16
    for call in calls:
        assert call.arguments["input"].shape == (1, tokens, heads, channels)
        assert call.arguments["r1"].shape == (1, tokens, 1, channels)


@pytest.mark.usefixtures("platform")
def test_a_rotary_operator_that_pairs_halves_is_refused_before_serving(monkeypatch):
    right = operators.BODIES["npu_rotary_mul"]

    def halves(*args, **kwargs):
        return right(*args, **kwargs | {"rotary_mode": "half"})

    monkeypatch.setitem(operators.BODIES, "npu_rotary_mul", halves)
    with pytest.raises(ConfigError, match="set lingbot_npu_rotary_mul: false"):
        Worker(config("npu", npu_rotary_mul=True))


@pytest.mark.usefixtures("platform")
def test_quantised_feed_forward_linears_and_no_others_run_in_8_bits():
    """Bitwise with the CPU reference in the same place."""
    standin.calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
        here = rollout(config("npu", npu_quant="w8a8"), OutputKind.LATENT)
        products = operator_calls("npu_quant_matmul")
        # Two linears in each layer of four probes, and in all but the last layer of a commit.
        assert len(products) == CHUNKS * 2 * (4 * LAYERS + LAYERS - 1)
        assert len(operator_calls("npu_format_cast")) == 2 * LAYERS
        there = rollout(config("cpu", npu_quant="w8a8"), OutputKind.LATENT)
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    assert not np.array_equal(there[0], plain_host_latents()[0])
