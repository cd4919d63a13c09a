"""A checkpoint is found on this machine."""

import errno
import os
from pathlib import Path

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.deploy_file import load_deploy_file
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.registry import model_of
from vllm_omni.errors import CheckpointError, ConfigError
from vllm_omni.model_extras import find_checkpoint

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_itself(tmp_path):
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_the_toy_world_is_found_by_its_name_unless_a_directory_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (find_checkpoint("toy_world") / "model_index.json").is_file()
    (tmp_path / "toy_world").mkdir()
    assert find_checkpoint("toy_world").resolve() == tmp_path / "toy_world"


def test_a_hub_id_is_looked_up_in_the_local_cache_only(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--world"
    snapshot = write_fake_checkpoint(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert find_checkpoint("some/world") == snapshot


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "not a model source"),
        ("/no/such/directory", "is not a directory"),
        ("./no-such", "is not a directory .looked for at {here}/no-such"),
        ("some/one/else", "is not a directory .looked for at {here}/some/one/else"),
        ("build/nope", "no such directory: {here}/build/nope;.*`hf download build/nope`"),
    ],
)
def test_what_is_not_on_this_machine(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message.format(here=tmp_path)):
        find_checkpoint(model)


def test_a_file_is_not_a_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        find_checkpoint(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("~no_such_user/model", "'~no_such_user/model' cannot be read: Could not determine home"),
        ("a" * 300, "cannot be read: File name too long"),
        ("/dev/null/model", "is not a directory"),
    ],
)
def test_what_the_system_refuses_is_one_line(model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_checkpoint(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "file",
    ["model_index.json", "transformer/config.json", "tokenizer/tokenizer.json",
     "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"],
)  # fmt: skip
def test_a_pipe_is_refused_and_nobody_waits_for_its_writer(file, tmp_path):
    model = write_fake_checkpoint(tmp_path / "model")
    (model / file).unlink()
    os.mkfifo(model / file)
    with pytest.raises(CheckpointError, match="it is a pipe"):
        model_of(model).check_checkpoint(model, DiffusionParallelConfig())


def test_an_index_without_bottom_is_no_json(tmp_path):
    (tmp_path / "model_index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        model_of(tmp_path)


def test_a_path_that_is_not_utf8_is_refused(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with pytest.raises(ConfigError, match=r"caf.udce9'.*UTF-8; rename it") as caught:
        find_checkpoint(os.fsdecode(folder))
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.mkdir(), "Deploy config not found"),
        (lambda file: file.symlink_to(file), "Deploy config not found"),
        (lambda file: file.write_bytes(b"a: \xff"), "is not valid YAML"),
    ],
)
def test_a_deploy_file_that_cannot_be_read_is_named(tmp_path, spoil, message):
    file = tmp_path / "world.yaml"
    spoil(file)
    with pytest.raises(ConfigError, match=message) as caught:
        load_deploy_file(file)
    assert "world.yaml" in str(caught.value)


def test_a_deploy_file_of_nobody_is_named():
    with pytest.raises(ConfigError, match=r"'~no_such_user/world.yaml': Could not determine home"):
        load_deploy_file("~no_such_user/world.yaml")


def test_a_deploy_file_that_is_closed_to_us_is_named(tmp_path, monkeypatch):
    """Root may read everything, so the system's answer is put in its place."""
    file = tmp_path / "world.yaml"
    file.write_text("stages: []")

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"deploy config '.*world.yaml': Permission denied"):
        load_deploy_file(file)
