"""The start-up look says in words what a setting without a value means."""

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.resolve import resolve

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

KV = "model_config.ar_diffusion_kv_config"


def shown(resolved):
    return {value.key: str(value.shown) for value in resolved.origins}


@pytest.fixture
def model(tmp_path):
    return str(write_fake_checkpoint(tmp_path / "model"))


def test_what_is_left_to_the_checkpoint_says_so(model):
    said = shown(resolve(model))
    for key in (f"{KV}.window_chunks", f"{KV}.sink_chunks", "flow_shift"):
        assert said[key] == "the checkpoint's"
    assert said["devices"] == "all"
    assert said["max_num_seqs"] == "1"


def test_what_was_given_is_shown_as_given(model):
    kv = {"ar_diffusion_kv_config": {"window_chunks": 4, "sink_chunks": 2}}
    resolved = resolve(model, overrides={"model_config": kv, "max_queued": 0})
    said = shown(resolved)
    assert (said[f"{KV}.window_chunks"], said[f"{KV}.sink_chunks"]) == ("4", "2")
    assert said["max_queued"] == "0"
    lines = [str(value) for value in resolved.origins]
    assert f"{KV}.sink_chunks = 2 (keyword argument)" in lines
