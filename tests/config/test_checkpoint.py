"""A checkpoint is found on this machine."""

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.checkpoint import find_checkpoint
from vllm_omni.errors import ConfigError

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
