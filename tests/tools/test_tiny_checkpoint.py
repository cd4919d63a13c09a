"""The tiny checkpoint is reproduced bit for bit, and nothing of a user's is ever overwritten."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.helpers.golden import golden_dir, requires_golden
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.errors import ConfigError
from vllm_omni.tools.tiny_checkpoint import (
    Shapes,
    checkpoint_files,
    text_encoder_shapes,
    transformer_shapes,
    vae_shapes,
    write_tiny_checkpoint,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SHA256 = {
    "model_index.json": "16d4df0f2cdd8ae7c422752cc5ca061cdd34a587c8f60b0d804582b3320a6209",
    "scheduler/scheduler_config.json": (
        "61a48c263947ef92124d5d3beb48514893432c3d02b1740499502c3f08a5c541"
    ),
    "text_encoder/config.json": "4612b4f48462ba23e8aff78b145db78039168cc6c3ea04dbaa37b57055dccbcb",
    "text_encoder/model.safetensors": (
        "0df53ea06ef9058e85a5b00772657cd799694b5b3aa91199a48618baf35245cd"
    ),
    "tokenizer/tokenizer.json": "204c87c643c29a8ee1bde7594d0a6678ef39d00bb9abf6bbf542fec9ac5f31b2",
    "tokenizer/tokenizer_config.json": (
        "a36e27efb07f71e6a6161dff224df6206dcaaee2fa80f9a35df64cd9849bd443"
    ),
    "transformer/config.json": "11dd4e22766b27825e8c83f0c5e51b85f9f7e332731f764ddab405d153e12cfd",
    "transformer/diffusion_pytorch_model.safetensors": (
        "e8727f1c10b8a03409b7c40d7c59da68e632fe71b38f6cd0bc168ea343fe943a"
    ),
    "vae/config.json": "aeeb5c434586aa241e586f85d6190b4dd638843da20582a8b2088706ddce9817",
    "vae/diffusion_pytorch_model.safetensors": (
        "03b010e98859aa1f4fd1b00739b938462e1b9b7451c6d5590d20d5923c9d7195"
    ),
}


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_every_file_is_reproduced_bitwise():
    assert _digests(tiny_checkpoint_dir()) == SHA256
    assert list(checkpoint_files()) == sorted(SHA256)


REAL_TRANSFORMER = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 36,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "sink_size": 9,
    "sliding_window_num_frames": 18,
}
REAL_TEXT_ENCODER = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 256384,
    "relative_attention_num_buckets": 32,
}


@requires_golden
def test_the_tables_also_describe_the_real_checkpoint():
    """Independent oracle: names and shapes of the published 14B checkpoint, all equal."""
    real = json.loads((golden_dir() / "real_14b_names.json").read_text())
    vae_config = json.loads((tiny_checkpoint_dir() / "vae" / "config.json").read_text())

    assert _as_lists(transformer_shapes(REAL_TRANSFORMER)) == real["transformer"]["shapes"]
    assert _as_lists(vae_shapes(vae_config | {"base_dim": 96})) == real["vae"]["shapes"]
    # The list names the tied embedding twice; a checkpoint stores it once.
    expected = dict(real["text_encoder"]["shapes"])
    del expected["encoder.embed_tokens.weight"]
    assert _as_lists(text_encoder_shapes(REAL_TEXT_ENCODER)) == expected


def _as_lists(shapes: Shapes) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def test_a_directory_with_files_is_refused_and_left_alone(tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        write_tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        write_tiny_checkpoint(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert mine.read_text() == "mine"


def test_a_file_in_the_way_is_refused(tmp_path):
    target = tmp_path / "checkpoint"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="not a directory"):
        write_tiny_checkpoint(target, force=True)


def test_a_parent_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot make .*file: .*name another directory"):
        write_tiny_checkpoint(tmp_path / "file" / "tiny")


def test_force_replaces_an_earlier_tiny_checkpoint(tmp_path):
    target = write_tiny_checkpoint(tmp_path / "new" / "checkpoint")
    (target / "vae" / "config.json").write_text("{}")
    assert _digests(write_tiny_checkpoint(target, force=True)) == SHA256
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_and_folders_have_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        checkpoint = write_tiny_checkpoint(tmp_path / "model")
    finally:
        os.umask(before)
    for path in (checkpoint, *checkpoint.rglob("*")):
        asked = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == asked & ~umask, path


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_args: object, **_options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vllm_omni.tools.tiny_checkpoint.write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny_checkpoint(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
