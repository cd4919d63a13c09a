"""The choice of what linears are made of; ``tests/vllm`` asks the same of both implementations."""

import sys
from pathlib import Path

import pytest
import torch

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import (
    NATIVE,
    LinearBackend,
    PlainLinearMethod,
    ReplicatedLinear,
    create_linear_backend,
)
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def choose(name: str) -> LinearBackend:
    return create_linear_backend(
        name,
        {},
        checkpoint=Path(),
        parallel=ParallelState(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_native_leaves_the_layers_as_they_were_built():
    backend = choose("native")
    assert backend is NATIVE
    module = torch.nn.Sequential(ReplicatedLinear(4, 6, torch.float32, PlainLinearMethod()))
    layer, weight = module[0], module[0].weight
    backend.install(module)
    backend.process(module)
    backend.release()
    assert module[0] is layer
    assert module[0].weight is weight


def test_vllm_that_cannot_be_imported_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("linear_vllm", "vllm_world"):
        monkeypatch.delitem(sys.modules, f"vllm_omni.diffusion.layers.{name}", raising=False)
    with pytest.raises(
        ConfigError, match=r"linear_backend vllm needs vLLM, .* leave linear_backen"
    ):
        choose("vllm")
