"""The offline interface and the quality report on a simulated device: the branch of serving."""

import numpy as np
import pytest

from tests.helpers.socket_client import picture_url
from tests.helpers.tiny import tiny_checkpoint_dir
from tests.npu_sim.device import operator_calls, order
from vllm_omni import Omni
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.tools.quant_report import make_report

__all__ = ["order"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.npu]

PROMPT = {"prompt": "a harbour", "multi_modal_data": {"image": picture_url()}}
CHUNKS = 4
"""The tiny window of nine latent frames rolls in the last one."""
SCRIPT = [[["w"], ["w"], ["l"]]] * CHUNKS
FRAMES = 9 + 12 * (CHUNKS - 1)


@pytest.fixture(autouse=True)
def sums_in_the_order_of_the_cpu(monkeypatch):
    monkeypatch.setattr(ConvPath, "choose", lambda *_: ConvPath.STACKED)


def generated(device: str, kind: str) -> np.ndarray:
    params = OmniDiffusionSamplingParams(
        height=64, width=96, num_frames=FRAMES, seed=7, output_type=kind, generator_device="cpu",
        extra_args={"camera_action_script": SCRIPT},
    )  # fmt: skip
    with Omni(str(tiny_checkpoint_dir()), device=device, dtype="bfloat16") as omni:
        (output,) = omni.generate(PROMPT, params, use_tqdm=False)
    return np.asarray(output.latents if kind == "latent" else output.images[0])


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kind", ["latent", "np"])
def test_a_clip_of_the_offline_interface_has_the_bytes_of_the_cpu(kind):
    """Bitwise: the CPU's attention stands behind the operator, the noise is the host's."""
    here = generated("npu", kind)
    assert operator_calls("npu_fusion_attention")
    assert np.array_equal(here, generated("cpu", kind))


@pytest.mark.usefixtures("order")
def test_the_quality_report_measures_the_operators_of_the_device():
    """Lossy: the noise of the device makes another world, whose errors are of the same size."""
    reports = {
        device: make_report(
            OmniDiffusionConfig(
                model=str(tiny_checkpoint_dir()), device=device, dtype="bfloat16",
                geometry=VideoGeometry(64, 96), npu_quant="w8a8",
            ),
            num_chunks=2,
        )
        for device in ("cpu", "npu")
    }  # fmt: skip
    assert operator_calls("npu_quant_matmul")
    for here, there in zip(reports["npu"].layers, reports["cpu"].layers, strict=True):
        assert here.name == there.name
        assert here.relative == pytest.approx(there.relative, rel=0.1)
    assert reports["npu"].int8_bytes == reports["cpu"].int8_bytes
