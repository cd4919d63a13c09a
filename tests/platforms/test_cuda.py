"""What the CUDA platform refuses before it touches a GPU."""

import pytest
import torch

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.cuda import CudaPlatform

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.9.1", "1.13.1"])
def test_a_torch_with_an_unsound_cudnn_is_refused(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ConfigError, match=r"needs torch 2\.11 or newer, got"):
        CudaPlatform().device(0)


def test_float32_means_float32_whatever_the_process_had_before(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert CudaPlatform().device(1) == torch.device("cuda", 1)
        after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        assert after == (False, False)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "3.0.0a0+git1"])
def test_a_sound_torch_is_asked_for_its_gpus(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="sees 0 GPUs"):
        CudaPlatform().device(0)
