"""The branches for NPUs run on a device in Python; the vendor's schemas take their arguments."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.sessions import make_rollout, small_request
from tests.helpers.tiny import tiny_config, tiny_prompt
from tests.npu import python_device
from tests.npu_sim.operators import BODIES
from vllm_omni.diffusion.attention import npu_fusion
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.messages import OutputKind, PromptStep
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath
from vllm_omni.errors import ConfigError
from vllm_omni.platforms import create_platform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CHUNKS, LAYERS = 2, 3


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    python_device.install()
    return create_platform("npu").device(0)


def latents(device_type: str, **changes) -> list[np.ndarray]:
    """A world whose noise is drawn on the host and whose prompt changes once."""
    executor = InlineExecutor(tiny_config(device=device_type, dtype="bfloat16", **changes))
    executor.start()
    request = small_request(num_chunks=CHUNKS, output=OutputKind.LATENT)
    prompts = {1: PromptStep(tiny_prompt("a frozen lake"), 1.0)}
    made = make_rollout(executor, replace(request, generator_device="cpu"), prompts=prompts)
    executor.shutdown()
    return made


def test_a_world_has_the_bytes_of_the_cpu(monkeypatch):
    """Bitwise: same kernels on the same values; the VAE's path is set to the CPU's.

    The body of the fused rotary operator rounds every product, as torch's own operators do; those
    of the 8-bit linears and their CPU reference are written independently.
    """
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)
    python_device.calls.clear()
    here = latents("npu", npu_rotary_mul=True, npu_quant="w8a8")
    called = {name: [c for c in python_device.calls if c.name == name] for name in BODIES}
    there = latents("cpu", npu_quant="w8a8")
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    for call in python_device.calls:
        given = [x for x in call.arguments.values() if isinstance(x, torch.Tensor)]
        assert {x.device.type for x in given} == {"npu"}
    # Four probes and a commit whose last layer only writes; the first ones check the operators, the
    # attention in two cases, both ways.
    attentions = CHUNKS * (4 * 2 * LAYERS + 2 * (LAYERS - 1))
    assert len(called["npu_fusion_attention"]) == 2 * 2 + attentions
    assert len(called["npu_rotary_mul"]) == 1 + CHUNKS * (2 * 5 * LAYERS - 1)
    assert len(called["npu_quant_matmul"]) == CHUNKS * 2 * (5 * LAYERS - 1)
    assert len(called["npu_format_cast"]) == 2 * LAYERS


def test_a_wrong_operator_is_refused_before_serving(monkeypatch):
    right = BODIES["npu_fusion_attention"]
    monkeypatch.setitem(
        BODIES, "npu_fusion_attention", lambda *a, **k: right(*a, **k | {"scale": 1.0})
    )
    executor = InlineExecutor(tiny_config(device="npu", dtype="bfloat16"))
    with pytest.raises(ConfigError, match="attention backend npu_fusion is wrong on npu:0"):
        executor.start()


def test_a_wrong_argument_name_is_refused_by_the_vendors_schema(device):
    x = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16, device=device)
    with pytest.raises(RuntimeError, match="scale_value"):
        npu_fusion.load_torch_npu().npu_fusion_attention(x, x, x, 2, "BSND", scale_value=0.5)


def test_float32_and_devices_that_are_not_there_are_refused(device):
    x = torch.zeros(3, 2, 16, device=device)
    with pytest.raises(ConfigError, match="dtype: bfloat16"):
        create_attention_backend("npu_fusion").attend(x, x, x, scale=0.25)
    with pytest.raises(ConfigError, match=r"rank 64 needs device npu, .* sees \d+ NPUs; check"):
        create_platform("npu").device(64)
