"""What is read from the checkpoint's JSON files, and what is refused by name."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.data import DiffusionParallelConfig, KVCacheConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.models.checkpoint_files import read_json
from vllm_omni.diffusion.models.lingbot_world.config import (
    LingBotWorldConfig,
    read_flow_shift,
)
from vllm_omni.diffusion.models.lingbot_world.load import read_checkpoint
from vllm_omni.errors import CheckpointError, ConfigError, UnsupportedParallelismError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SCHEDULER = "scheduler/scheduler_config.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint's JSON files."""
    for path in tiny_checkpoint_dir().rglob("*.json"):
        target = tmp_path / path.relative_to(tiny_checkpoint_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    """Set fields of a JSON file; a value of ``...`` removes the field."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def test_the_tiny_checkpoint(checkpoint):
    facts = read_checkpoint(checkpoint, KVCacheConfig())
    model = facts.transformer
    assert (model.num_attention_heads, model.attention_head_dim, model.num_layers) == (4, 16, 3)
    assert (model.window.window_frames, model.window.sink_frames) == (9, 3)
    assert facts.flow_shift == 5.0


def test_the_real_model_is_the_default():
    model = LingBotWorldConfig()
    assert (model.dim, model.num_layers, model.ffn_dim) == (5120, 40, 13824)
    assert (model.window.window_frames, model.window.sink_frames) == (18, 9)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window_num_frames": 12, "sink_size": 5}, (12, 5)),
        ({"local_attn_size": 8, "sink_size": 4}, (8, 4)),
        ({"local_attn_size": -1}, (18, 9)),
    ],
)
def test_window(fields, window):
    model = LingBotWorldConfig.from_dict(fields)
    assert (model.window.window_frames, model.window.sink_frames) == window


def test_the_deploy_file_replaces_the_window(checkpoint):
    facts = read_checkpoint(checkpoint, KVCacheConfig(window_chunks=9, sink_chunks=9))
    assert (facts.transformer.window.window_frames, facts.transformer.window.sink_frames) == (18, 9)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"_class_name": "WanTransformer3DModel"}, "_class_name must be 'CausalLingBotWorld"),
        ({"patch_size": [1, 4, 4]}, r"patch_size must be \[1, 2, 2\], got \[1, 4, 4\]"),
        ({"qk_norm": "rms_norm"}, "qk_norm must be 'rms_norm_across_heads', got 'rms_norm'"),
        ({"num_frames_per_block": 4}, "num_frames_per_block must be 3, got 4"),
        ({"num_layers": "three"}, 'num_layers: must be an integer, got "three"'),
        ({"num_layers": True}, "num_layers: must be an integer, got true"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"attention_head_dim": 15}, "attention_head_dim must be even and at least 6"),
        ({"in_channels": 32}, r"in_channels must be 2 \* out_channels \+ 4"),
        ({"freq_dim": 63}, "freq_dim must be even, got 63"),
    ],
)
def test_a_field_of_another_model_is_named(checkpoint, changes, text):
    edit(checkpoint / "transformer" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=text):
        read_checkpoint(checkpoint, KVCacheConfig())


def test_a_window_without_room_for_a_chunk_is_refused(checkpoint):
    edit(checkpoint / "transformer" / "config.json", sink_size=7)
    with pytest.raises(ConfigError, match="leaves 2 rolling frames"):
        read_checkpoint(checkpoint, KVCacheConfig())


@pytest.mark.parametrize(
    ("file", "changes", "text"),
    [
        ("model_index.json", {"_class_name": "WanPipeline"}, "CausalDMDPipeline, got 'WanPipe"),
        ("model_index.json", {"_class_name": ...}, "got None"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "vae/config.json: _class_name"),
        (SCHEDULER, {"use_karras_sigmas": True}, "use_karras_sigmas must be False, got True"),
        (SCHEDULER, {"predict_x0": ...}, "scheduler config: predict_x0 missing"),
        (SCHEDULER, {"flow_shift": 0}, "flow_shift: must be above 0, got 0"),
    ],
)
def test_other_files_are_checked(checkpoint, file, changes, text):
    edit(checkpoint / file, **changes)
    with pytest.raises(CheckpointError, match=text):
        read_checkpoint(checkpoint, KVCacheConfig())


@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json", "vae/config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_missing_or_damaged_files_are_named(checkpoint, file, content):
    path = checkpoint / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        read_checkpoint(checkpoint, KVCacheConfig())


def test_flow_shift_has_two_names_and_a_default():
    fixed = read_json(tiny_checkpoint_dir() / "scheduler" / "scheduler_config.json")
    bare = {name: value for name, value in fixed.items() if name not in {"flow_shift", "shift"}}
    assert read_flow_shift(bare) == 5.0
    assert read_flow_shift({**bare, "shift": 3}) == 3.0
    assert read_flow_shift({**bare, "shift": 3, "flow_shift": 8.0}) == 8.0


def test_heads_that_cannot_be_split_are_refused_with_all_numbers():
    parallel = DiffusionParallelConfig(ulysses_degree=3)
    with pytest.raises(UnsupportedParallelismError, match=r"^40 .*_size 1 x ulysses_degree 3 = 3"):
        parallel.check_heads(40)
    with pytest.raises(UnsupportedParallelismError, match="832x464 has 1508 tokens"):
        parallel.check_geometry(VideoGeometry(464, 832))
