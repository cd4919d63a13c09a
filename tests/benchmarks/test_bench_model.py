"""The model benchmark runs at small size and prints complete, consistent JSON."""

import json
import math

import pytest

from benchmarks.lingbot_world.bench_host import first_chunk, import_costs
from benchmarks.lingbot_world.bench_model import main, parse_arguments
from benchmarks.lingbot_world.bench_real import scale_of
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig

pytestmark = [pytest.mark.core_model, pytest.mark.benchmark, pytest.mark.cpu]

PARTS = {"condition_ms", "camera_ms", "probes_ms", "decode_ms", "commit_ms"}


def run(capsys, *arguments):
    main([*arguments])
    return json.loads(capsys.readouterr().out)


def numbers(value):
    if isinstance(value, dict):
        for child in value.values():
            yield from numbers(child)
    elif isinstance(value, list):
        for child in value:
            yield from numbers(child)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_small_run_splits_the_chunk(capsys, tmp_path):
    path = tmp_path / "result.json"
    result = run(
        capsys, "--no-processes", "--height", "32", "--width", "48", "--chunks", "4", "--json",
        str(path),
    )  # fmt: skip
    assert json.loads(path.read_text()) == result
    small = result["small"]
    assert set(small["chunk"]["median_ms"]) == PARTS
    assert small["chunk"]["total_ms"] == pytest.approx(sum(small["chunk"]["median_ms"].values()))
    assert len(small["chunk"]["each_ms"]) == 4
    assert small["attention"]["self_attention_calls_per_chunk"] == 5 * 3 - 1
    decode = small["decode"]
    assert decode["ratio"] == pytest.approx(decode["auto_ms"] / decode["conv3d_ms"])
    assert all(math.isfinite(n) and n >= 0 for n in numbers(small))
    assert {"cpu", "threads", "torch", "commit"} <= set(result["environment"])


def test_real_shapes_at_small_scale_stand_beside_bounds(capsys):
    result = run(capsys, "--real-shapes", "--scale", "tiny", "--bound-device", "H200")
    shapes = result["real_shapes"]
    assert [chunk["chunk"] for chunk in shapes["chunks"]] == list(range(1, 9))
    for chunk in shapes["chunks"]:
        parts = chunk["camera_ms"] + chunk["probes_ms"] + chunk["commit_ms"]
        assert chunk["total_ms"] == pytest.approx(parts)
        assert 0 < chunk["bound_ms"] < chunk["total_ms"]
    assert shapes["chunks"][0]["bound_ms"] < shapes["chunks"][-1]["bound_ms"]  # the window grows
    shares = {f"{name} of 4 ranks" for name in ("qkv", "kv", "q")}
    assert set(shapes["products"]) == {"qkv", "out", "ffn_in", "ffn_out"} | shares
    for part in ("layer", "decode"):
        assert 0 < shapes[part]["bound_ms"] < shapes[part]["ms"]
    assert shapes["attention"]["tflops"] > 0
    assert shapes["dtype"] == "bfloat16"


def test_without_rates_there_are_no_bounds(capsys):
    shapes = run(capsys, "--real-shapes", "--scale", "tiny")["real_shapes"]
    assert shapes["bounds_of"] is None
    assert shapes["layer"]["bound_ms"] is None
    assert shapes["chunks"][0]["bound_ms"] is None


def test_full_scale_is_the_released_model():
    scale = scale_of("full")
    assert scale.transformer == LingBotWorldConfig()
    assert scale.vae.base_dim == 96
    assert str(scale.geometry) == "832x480"


@pytest.mark.advanced_model
def test_fresh_processes_report_their_own_costs():
    """The ceilings are three times the goal or more; what matters is that torch stays out."""
    costs = import_costs(1)
    for name in ("interpreter", "vllm_omni", "command_line_help"):
        assert not costs[name]["loaded_torch"]
        assert costs[name]["rss_mib"] < 100
    assert costs["worker"]["loaded_torch"]
    assert costs["worker"]["cpu_s"] > costs["vllm_omni"]["cpu_s"]


def test_first_chunk_comes_and_its_parts_add_up():
    first = first_chunk(tiny_checkpoint_dir(), height=32, width=48, repeats=1)
    parts = sum(first[part] for part in ("import_s", "load_s", "open_s", "chunk_s"))
    assert 0 < parts < first["wall_s"]
    assert first["cpu_s"] < 3 * first["goal"]["wall_s"]
    assert first["rss_mib"] < 3 * first["goal"]["rss_mib"]


def test_the_commands_of_the_documentation_parse():
    options = parse_arguments(["--device", "cuda", "--real-shapes"])
    assert (options.device, options.scale, options.bound_device) == ("cuda", "full", None)
