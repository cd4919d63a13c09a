"""The report of what 8-bit linears lose, on the tiny model."""

import json
import re

import pytest
import torch

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
from vllm_omni.errors import ConfigError
from vllm_omni.tools.quant_report import main, make_report

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def config(**changes) -> OmniDiffusionConfig:
    size = VideoGeometry(64, 96)
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()), geometry=size, **{"dtype": "bfloat16"} | changes
    )


@pytest.fixture(scope="module")
def report():
    return make_report(config(), num_chunks=4)


def test_every_feed_forward_linear_is_measured_and_no_other(report):
    names = [layer.name for layer in report.layers]
    assert names == [f"blocks.{block}.ffn.{part}" for block in range(3) for part in (0, 2)]


def test_errors_are_those_of_eight_bits(report):
    """Lossy: rows of gaussian-like numbers lose about half a percent for each factor; inputs of
    the second linear are lopsided, so it may lose a few times as much."""
    for layer in report.layers:
        assert 0.002 < layer.relative < 0.04
    assert 0.999 < report.latent_0_cosine < 1.0
    assert [chunk.index for chunk in report.chunks] == [0, 1, 2, 3]
    assert all(0.0 < chunk.relative < 0.05 for chunk in report.chunks)
    assert report.worst_chunk.relative == max(chunk.relative for chunk in report.chunks)


def test_bytes_before_and_after_are_those_of_the_shapes(report):
    dim, ffn, layers = 64, 256, 3
    assert report.plain_bytes == 2 * 2 * dim * ffn * layers
    assert report.int8_bytes == 2 * dim * ffn * layers + 4 * (dim + ffn) * layers


def test_without_a_difference_the_report_is_perfect(monkeypatch):
    """Bitwise: the two forms see the same noise and the same history."""

    def plain(_method, layer, x, bias):
        return torch.nn.functional.linear(x, layer.weight, bias)

    monkeypatch.setattr(Int8LinearMethod, "apply", plain)
    perfect = make_report(config(), num_chunks=2)
    assert [chunk.relative for chunk in perfect.chunks] == [0.0, 0.0]
    assert perfect.latent_0_cosine == pytest.approx(1.0, abs=1e-12)
    assert [layer.relative for layer in perfect.layers] == [0.0] * 6


def test_float32_is_refused():
    with pytest.raises(ConfigError, match="needs dtype bfloat16"):
        make_report(config(dtype="float32"), num_chunks=1)


def test_the_command_prints_and_writes(tmp_path, capsys):
    target = tmp_path / "report.json"
    arguments = [str(tiny_checkpoint_dir()), "--height", "64", "--width", "96", "--chunks", "1"]
    assert main([*arguments, "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^blocks\.0\.ffn\.0 +relative error 0\.0\d+$", printed, re.MULTILINE)
    assert re.search(r"^worst chunk 0: cosine 0\.99\d+", printed, re.MULTILINE)
    written = json.loads(target.read_text())
    assert f"cosine {written['latent_0_cosine']:.6f}" in printed
