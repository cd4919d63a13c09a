"""The deploy files for Ascend: they load as they are, and their comments hold the right sums."""

import re
from pathlib import Path

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "benchmarks" / "lingbot_world" / "configs"
RECIPE = ROOT / "docs" / "recipes" / "lingbot_world_v2_npu.md"
HEADS, LAYERS, DIM, FFN_DIM = 40, 40, 5120, 13824
FILES = {4: CONFIGS / "npu_usp4_eager.yaml", 8: CONFIGS / "npu_usp8_eager.yaml"}


def spec_of_a_rank(config) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=LAYERS, num_kv_heads=HEADS // config.parallel.ulysses_degree, text_heads=HEADS,
        head_dim=DIM // HEADS, window_frames=18, sink_frames=9, text_tokens=512, element_bytes=2,
        page_tokens=config.kv_cache.page_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", FILES)
def test_a_file_loads_and_its_comment_is_right(tmp_path, ranks):
    model = write_fake_checkpoint(tmp_path / "real", heads=HEADS)
    config = resolve(str(model), deploy_config=FILES[ranks], platform="npu").config
    assert config.device == "npu"
    assert config.devices == ",".join(str(rank) for rank in range(ranks))
    assert config.parallel.world_size == config.parallel.ulysses_degree == ranks
    assert config.geometry == VideoGeometry(480, 832)
    assert (config.leased_post_attention, config.npu_quant) == (False, None)
    spec = spec_of_a_rank(config)
    pages = spec.window_pages(config.geometry.tokens_per_frame)
    comment = FILES[ranks].read_text(encoding="utf-8")
    assert f"{pages} x {spec.page_tokens} x 2" in comment or f"{pages} pages x" in comment
    window_bytes = f"{pages * spec.page_bytes:,}"
    gib = f"{pages * spec.page_bytes / 2**30:.1f}"
    assert f"= {window_bytes} bytes ({gib} GiB)" in " ".join(comment.replace("#", "").split())
    assert f"{spec.text_bytes:,} bytes" in comment
    assert f"| session: KV window ({pages} pages of 128 tokens) | 5.4 | 2.7 |" in RECIPE.read_text()


def test_the_recipes_bytes_of_quantised_weights_are_the_shapes():
    text = RECIPE.read_text(encoding="utf-8")
    elements = LAYERS * 2 * DIM * FFN_DIM
    assert f"{2 * elements:,}" in text
    assert f"{elements + 4 * LAYERS * (DIM + FFN_DIM):,}" in text
    saved = (elements - 4 * LAYERS * (DIM + FFN_DIM)) / 2**30
    assert f"| -{saved:.1f} | -{saved:.1f} |" in text


@pytest.mark.parametrize("column", [1, 2])
def test_the_recipes_memory_adds_up(column):
    text = RECIPE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!\*\*)([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    total = re.search(r"\*\*sum without activations\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)", text)
    assert sum(float(row[column]) for row in rows) == pytest.approx(float(total[column]))


@pytest.mark.parametrize(("ranks", "column"), [(4, 1), (8, 2)])
def test_the_recipes_memory_of_graphs_is_outputs_inputs_and_one_blocks_temporaries(ranks, column):
    """The simulated device measures the figure; here it must agree with the shapes and the row."""
    text = " ".join(RECIPE.read_text(encoding="utf-8").split())
    tokens = 3 * 1560 // ranks
    outputs_and_inputs = LAYERS * 2 * 3 * tokens * DIM * 2 + 2 * (4 * tokens * DIM * 2 + DIM * 4)
    one_temporary = tokens * DIM * 4
    figure = re.search(rf"([\d,]+) MiB at {tokens:,}", text)
    reserved = int(figure[1].replace(",", "")) * 2**20
    assert outputs_and_inputs + 2 * one_temporary < reserved < 1.15 * outputs_and_inputs
    more = re.search(r"(\d+) and (\d+) % more", text)
    assert int(more[column]) == round(100 * (reserved / outputs_and_inputs - 1))
    row = re.search(r"leased_post_attention: true` \| \+([\d.]+) \| \+([\d.]+) \|", text)
    assert row[column] == f"{reserved / 2**30:.1f}"
