"""Every file of a checkpoint that cannot be loaded is named before anything is loaded."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.helpers.other_user import needs_root, refusal_to_another_user
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import CheckpointError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 1664264\n"
)
WEIGHTS = (
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
)
SMALL_FILES = (
    "transformer/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(tiny_checkpoint_dir(), tmp_path / "model")


def refused(model) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(str(model))
    said = str(caught.value)
    assert "\n" not in said
    return said


def cut_short(file):
    os.truncate(file, file.stat().st_size - 1)


def cut_in_its_head(file):
    os.truncate(file, 100)


def emptied(file):
    file.write_bytes(b"")


def longer(file):
    file.write_bytes(file.read_bytes() + b"x")


def a_web_page(file):
    file.write_bytes(b"<!DOCTYPE html><html><body>404: Not Found</body></html>")


def a_pointer(file):
    file.write_bytes(POINTER)


def a_broken_link(file):
    file.unlink()
    file.symlink_to("/nonexistent/blob")


def gone(file):
    file.unlink()


def a_folder(file):
    file.unlink()
    file.mkdir()


def a_circle(file):
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut_short, "was its download cut short"),
        (cut_in_its_head, "it is no safetensors file, or the beginning of one"),
        (emptied, "of 0 bytes cannot be read"),
        (longer, "and should have"),
        (a_web_page, "it is no safetensors file"),
        (a_pointer, "`git lfs pull`"),
        (a_broken_link, "a link to nothing"),
        (gone, "the checkpoint has no "),
        (a_folder, "Is a directory"),
        (a_circle, "a link to nothing"),
    ],
)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_cannot_be_loaded(model, name, spoil, reason):
    spoil(model / name)
    said = refused(model)
    assert name in said
    assert reason in said


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (emptied, "is not JSON"),
        (cut_in_its_head, "is not JSON"),
        (a_web_page, "is not JSON"),
        (a_pointer, "`git lfs pull`"),
        (a_broken_link, "a link to nothing"),
        (a_folder, "Is a directory"),
    ],
)
@pytest.mark.parametrize("name", SMALL_FILES)
def test_small_files_that_cannot_be_read(model, name, spoil, reason):
    spoil(model / name)
    said = refused(model)
    assert name in said
    assert reason in said


def test_all_missing_shards_are_named(model):
    index = model / "text_encoder" / "model.safetensors.index.json"
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    said = refused(model)
    assert all(f"text_encoder/{name}" in said for name in names)


@needs_root
@pytest.mark.parametrize("name", ["vae", "text_encoder/model.safetensors", "tokenizer"])
def test_files_that_are_closed_to_us(name):
    """A private checkpoint: looked at in a process of another user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        model = shutil.copytree(tiny_checkpoint_dir(), Path(folder) / "model")
        (model / name).chmod(0)
        resolve(str(model))  # Root may; and everything is imported.
        said = refusal_to_another_user(lambda: resolve(str(model)), CheckpointError)
    assert "Permission denied" in said
    assert name in said
