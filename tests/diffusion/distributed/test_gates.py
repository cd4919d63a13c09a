"""What cannot run together is refused before any weight is read, with the numbers."""

import shutil
from dataclasses import replace

import pytest

from tests.helpers.tiny import tiny_checkpoint_dir, tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    UnsupportedParallelismError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

SIZE = VideoGeometry(64, 96)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"ulysses_degree": 2, "sequence_parallel_size": 4}, "is 4 but ulysses_degree is 2"),
        ({"ring_degree": 2}, "ring_degree=2"),
        ({"allgather_degree": 2}, "allgather_degree=2"),
        ({"ulysses_mode": "advanced_uaa"}, 'ulysses_mode="advanced_uaa" is refused'),
        ({"ulysses_a2a_permute": True}, "ulysses_a2a_permute=true is refused"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"cfg_parallel_size": 2}, "cfg_parallel_size=2"),
        ({"vae_patch_parallel_size": 2}, "vae_patch_parallel_size=2"),
        ({"use_hsdp": True}, "use_hsdp=true"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel=true"),
    ],
)
def test_degrees_that_this_model_does_not_run_with(degrees, text):
    with pytest.raises(UnsupportedParallelismError, match=text) as caught:
        DiffusionParallelConfig(**degrees)
    assert isinstance(caught.value, NotImplementedError)


def test_degrees_of_one_value_may_be_stated():
    stated = DiffusionParallelConfig(
        ulysses_degree=2, ring_degree=1, ulysses_mode="strict", use_hsdp=False, hsdp_shard_size=-1
    )
    assert stated == DiffusionParallelConfig(ulysses_degree=2)
    assert (stated.tensor_parallel_size, stated.world_size) == (1, 2)


def test_a_degree_that_is_none():
    unknown = "parallel_config.ulyses_degree is unknown; known are tensor_parallel_size, ulysses"
    with pytest.raises(ConfigTypeError, match=unknown):
        DiffusionParallelConfig(ulyses_degree=2)


def test_a_degree_below_one():
    with pytest.raises(
        ConfigError, match=r"parallel_config.ulysses_degree: must be at least 1, got 0"
    ):
        DiffusionParallelConfig(ulysses_degree=0)


@pytest.fixture
def without_weights(tmp_path):
    """The checkpoint's JSON files alone: reading any weight would fail."""
    return shutil.copytree(
        tiny_checkpoint_dir(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


@pytest.mark.parametrize(
    ("degrees", "changed", "text"),
    [
        (
            {"tensor_parallel_size": 2, "ulysses_degree": 4},
            {},
            "4 attention heads .* tensor_parallel_size 2 x ulysses_degree 4 = 8 ranks",
        ),
        ({"tensor_parallel_size": 3}, {}, "4 attention heads .* tensor_parallel_size 3"),
        (
            {"tensor_parallel_size": 4},
            {'"ffn_dim": 256': '"ffn_dim": 258'},
            "258 feed-forward features .* tensor_parallel_size 4",
        ),
    ],
)
def test_shapes_that_do_not_divide(without_weights, degrees, changed, text):
    file = without_weights / "transformer" / "config.json"
    for old, new in changed.items():
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    config = tiny_config("mp", parallel=DiffusionParallelConfig(**degrees))
    with pytest.raises(UnsupportedParallelismError, match=text):
        Worker(replace(config, model=str(without_weights)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"leased_post_attention": True, "geometry": None}, "ar_diffusion_height"),
        ({"leased_post_attention": True, "enforce_eager": False}, "enforce_eager"),
        ({"attention_backend": "npu_fusion"}, "torch_npu"),
    ],
)
def test_settings_that_do_not_go_together(without_weights, changes, text):
    config = tiny_config()
    with pytest.raises(ConfigError, match=text):
        Worker(replace(config, model=str(without_weights), **changes))


def test_the_fixture_has_no_weights(without_weights):
    with pytest.raises((CheckpointError, OSError)):
        Worker(replace(tiny_config(), model=str(without_weights)))


def test_tokens_of_the_configured_size():
    with pytest.raises(UnsupportedParallelismError, match=r"80x48 has 15 tokens .*_degree 2 "):
        tiny_config(
            "mp", parallel=DiffusionParallelConfig(ulysses_degree=2), geometry=VideoGeometry(48, 80)
        )
