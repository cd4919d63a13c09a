"""The training resumes where it stopped, and its smoke run lowers the losses."""

from pathlib import Path

import pytest
import torch

from vllm_omni.tools.toy_world.stage import Stage, averaged
from vllm_omni.tools.toy_world.train import main

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


def _fit(path: Path, until: int, steps: int = 8) -> Stage:
    torch.manual_seed(3)
    stage = Stage(path, torch.nn.Linear(9, 9), steps=steps, peak=1e-2)
    while stage.step < until:
        x = torch.randn(4, 9) + float(stage.rng.uniform())
        stage.learn((stage.model(x) - x.flip(-1)).square().mean())
    stage.save(now=True)
    return stage


def test_a_stage_that_is_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole.pt", until=8)
    _fit(tmp_path / "parts.pt", until=3)
    parts = _fit(tmp_path / "parts.pt", until=8)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, value in averaged(tmp_path / "whole.pt").items():
        assert torch.equal(value, averaged(tmp_path / "parts.pt")[name])


def test_a_gradient_that_is_not_finite_is_an_error_that_leaves_the_weights(tmp_path: Path) -> None:
    stage = _fit(tmp_path / "a.pt", until=2)
    before = [parameter.clone() for parameter in stage.model.parameters()]
    with pytest.raises(FloatingPointError, match="lower --peak"):
        stage.learn(stage.model(torch.full((1, 9), float("inf"))).sum() * 0)
    for old, new in zip(before, stage.model.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_smoke_run_lowers_the_losses_and_exports(tmp_path: Path) -> None:
    smoke = ["--out", str(tmp_path), "--smoke"]
    assert main(smoke) == 0
    assert (tmp_path / "checkpoint" / "README.md").exists()
    assert (tmp_path / "world.png").exists()
    # A second run finds everything done and writes the same checkpoint.
    weights = tmp_path / "checkpoint/transformer/diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    assert main(smoke) == 0
    assert weights.read_bytes() == before
    # A world that learns nothing fails: the same, at a learning rate of zero.
    (tmp_path / "world.pt").unlink()
    assert main([*smoke, "--stages", "world", "--peak", "0"]) == 1
