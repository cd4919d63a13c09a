"""The whole tiny model on one simulated device: bytes, order of work, transfers of every chunk.

The CPU's attention stands behind the operator and the noise is drawn on the host, so every byte
must be the CPU's. In deferred order a missing wait, event or hold on memory would change bytes.
"""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.sessions import small_request
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_prompt
from tests.npu_sim import kernels, operators, simulation
from tests.npu_sim.device import operator_calls, order
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, OutputKind, PromptStep
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import ConfigError

__all__ = ["order"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

CHUNKS = 4
"""The tiny window of nine latent frames rolls in the last one."""
LAYERS = 3
ATTENTIONS = 4 * 2 * LAYERS + 2 * (LAYERS - 1)
"""Self and cross-attention of four probes, and of a commit whose last layer only writes."""
TO_DEVICE = Counter(noise=4, rays=2, rotary=2)
"""Copies to the device in a chunk when the noise is drawn on the host."""
WAITS = ("stream_syncs", "event_syncs", "device_syncs")


def config(device_type: str, **changes) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), device=device_type, dtype="bfloat16",
        geometry=VideoGeometry(64, 96), **changes,
    )  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """What one chunk, or one call of a layer, moved and waited for."""

    transfers: Counter[str]
    runtime: Counter[str]

    @classmethod
    @contextmanager
    def noted(cls, notes: list["Spent"]):
        moved, before = kernels.transfers.copy(), simulation.runtime().counts()
        yield
        notes.append(cls(kernels.transfers - moved, simulation.runtime().counts() - before))


@dataclass(frozen=True)
class Rollout:
    """The chunks of one world, and what its chunks and layers spent."""

    chunks: list[np.ndarray]
    by_chunk: list[Spent]
    by_layer: list[Spent]
    attentions: list


def rollout(worker, kind=OutputKind.UINT8, *, chunks=CHUNKS, noise="cpu") -> Rollout:
    """Make one world whose prompt changes once."""
    made, by_chunk, by_layer = [], [], []
    kernels.calls.clear()
    # So that every world has to embed its prompts.
    worker.pipeline.model.text.encoder._cache.clear()
    forward = LingBotWorldBlock.forward

    def noted(*args, **kwargs):
        with Spent.noted(by_layer):
            return forward(*args, **kwargs)

    request = replace(small_request(num_chunks=chunks, output=kind), generator_device=noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LingBotWorldBlock, "forward", noted)
        worker.open_session("world", request)
        for index in range(chunks):
            prompt = PromptStep(tiny_prompt("a frozen lake"), 1.0) if index == 2 else None
            with Spent.noted(by_chunk):
                worker.run_chunk(ChunkPlan("world", index, prompt=prompt), made.append)
        worker.close_session("world")
    data = [chunk.data for chunk in made]
    return Rollout(data, by_chunk, by_layer, operator_calls("npu_fusion_attention"))


@cache
def loaded(device_type: str) -> Worker:
    """A worker that uses the VAE's path of the CPU, wherever it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
        return Worker(config(device_type))


@cache
def on_host(kind: OutputKind) -> Rollout:
    return rollout(loaded("cpu"), kind)


@cache
def on_device(order: str, kind: OutputKind) -> Rollout:
    assert order in {"eager", "deferred"}  # the fixture has set it
    return rollout(loaded("npu"), kind)


def same(here: Rollout, there: Rollout) -> bool:
    assert [len(chunk) for chunk in here.chunks] == [len(chunk) for chunk in there.chunks]
    return all(np.array_equal(a, b) for a, b in zip(here.chunks, there.chunks, strict=True))


@pytest.mark.parametrize("kind", [OutputKind.LATENT, OutputKind.UINT8])
def test_a_world_has_the_bytes_of_the_cpu(order, kind):
    """Bitwise: same kernels on the same values, whatever the order of streams."""
    assert same(on_device(order, kind), on_host(kind))


def test_a_second_world_is_equal_and_leaves_no_memory(order):
    first = on_device(order, OutputKind.UINT8)
    torch.npu.synchronize()
    held = torch.npu.memory_allocated()
    second = rollout(loaded("npu"))
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == held
    assert same(first, second)


def test_noise_of_the_device_makes_another_world_and_repeats(order):
    drawn = [
        rollout(loaded("npu"), OutputKind.LATENT, chunks=1, noise=noise)
        for noise in (None, None, "cpu")
    ]
    assert same(drawn[0], drawn[1])
    assert not same(drawn[0], drawn[2])
    assert order in {"eager", "deferred"}


def test_a_chunk_waits_once_for_its_pixels_and_nothing_else(order):
    made = on_device(order, OutputKind.UINT8)
    assert len(made.attentions) == CHUNKS * ATTENTIONS
    assert {call.arguments["query"].dtype for call in made.attentions} == {torch.bfloat16}
    for index, spent in enumerate(made.by_chunk):
        with_prompt = index == 2
        assert spent.transfers["to_host"] == 1
        # A prompt brings token ids and mask.
        assert spent.transfers["to_device"] == sum(TO_DEVICE.values()) + 2 * with_prompt
        # The history of the condition is compared until it repeats, and the text encoder looks
        # at its mask.
        assert spent.transfers["read_back"] <= 2 + with_prompt
        # The host waits for its pixels by one event; else only where it reads a value, and for the
        # tokens of a prompt, which are indices.
        # torch_npu also asks both events of each of four laps, which were done before the pixels.
        assert spent.transfers["blocking"] == 2 * with_prompt
        assert spent.runtime["event_syncs"] == 1 + 2 * 4
        assert spent.runtime["device_syncs"] == 0
        waits = spent.transfers["blocking"] + spent.transfers["read_back"]
        assert spent.runtime["stream_syncs"] == waits


def test_no_layer_of_the_transformer_waits_or_moves_anything(order):
    made = on_device(order, OutputKind.LATENT)
    assert len(made.by_layer) == CHUNKS * (5 * LAYERS - 1)  # a commit's last layer only writes
    for spent in made.by_layer:
        assert not spent.transfers
        assert not any(spent.runtime[name] for name in WAITS)


@pytest.mark.usefixtures("order")
def test_an_unknown_attention_result_is_refused_before_serving(monkeypatch):
    right = operators.BODIES["npu_fusion_attention"]

    def unscaled(*args, **kwargs):
        return right(*args, **kwargs | {"scale": 1.0})

    monkeypatch.setitem(operators.BODIES, "npu_fusion_attention", unscaled)
    with pytest.raises(ConfigError, match="attention backend npu_fusion is wrong on npu:0"):
        Worker(config("npu"))


@pytest.mark.usefixtures("order")
def test_the_fused_rotary_operator_makes_the_same_world(monkeypatch):
    """Bitwise: its body rounds every product, as torch's own operators do."""
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
    worker = Worker(config("npu", npu_rotary_mul=True))
    made = rollout(worker, OutputKind.LATENT)
    turned = [call.arguments for call in operator_calls("npu_rotary_mul")]
    # A query and a key in each layer of four probes and a commit, whose last layer has keys alone.
    assert len(turned) == CHUNKS * (2 * 5 * LAYERS - 1)
    tokens, heads, channels = 3 * 24, 4, 16
    for given in turned:
        assert (given["rotary_mode"], given["rotate"]) == ("interleave", None)
        assert given["input"].size == (1, tokens, heads, channels)
        assert given["r1"].size == given["r2"].size == (1, tokens, 1, channels)
    worker.shutdown()
    assert same(made, on_host(OutputKind.LATENT))


@pytest.mark.usefixtures("order")
def test_a_rotary_operator_that_pairs_halves_is_refused_before_serving(monkeypatch):
    right = operators.BODIES["npu_rotary_mul"]

    def halves(*args, **kwargs):
        return right(*args, **kwargs | {"rotary_mode": "half"})

    monkeypatch.setitem(operators.BODIES, "npu_rotary_mul", halves)
    with pytest.raises(ConfigError, match="set lingbot_npu_rotary_mul: false"):
        Worker(config("npu", npu_rotary_mul=True))


@pytest.mark.usefixtures("order")
def test_quantised_feed_forward_linears_have_the_bytes_of_the_cpu_reference(monkeypatch):
    """Bitwise with the CPU reference in the same place."""
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
    chunks, made = 2, {}
    for device_type in ("cpu", "npu"):
        worker = Worker(config(device_type, npu_quant="w8a8"))
        made[device_type] = rollout(worker, OutputKind.LATENT, chunks=chunks)
        worker.shutdown()
    products = operator_calls("npu_quant_matmul")
    # Two linears in each layer of four probes, and in all but the last layer of a commit.
    assert len(products) == chunks * 2 * (4 * LAYERS + LAYERS - 1)
    assert same(made["npu"], made["cpu"])


@pytest.mark.usefixtures("order")
def test_the_parts_of_a_chunk_are_timed_by_the_device():
    """The laps of its queue; they are complete when the pixels are on the host."""
    worker, made = loaded("npu"), []
    began_s = time.monotonic()
    worker.open_session("timed", replace(small_request(num_chunks=1), generator_device="cpu"))
    timings = worker.run_chunk(ChunkPlan("timed", 0), made.append)
    worker.close_session("timed")
    spent_ms = (time.monotonic() - began_s) * 1000.0
    laps = (timings.condition_ms, timings.camera_ms, timings.probes_ms, timings.decode_ms)
    assert min(laps) > 0.0
    assert sum(laps) < spent_ms
    assert made[0].timings == replace(
        timings, commit_ms=0.0, condition_ms=made[0].timings.condition_ms
    )
