"""Outputs of the Python API and what a checkpoint says about itself."""

import dataclasses
import json

import pytest

from vllm_omni.errors import CheckpointError
from vllm_omni.model_extras import get_model_class_name
from vllm_omni.outputs import OmniRequestOutput

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PUBLIC = {
    "request_id", "prompt", "finished", "stage_id", "replica_id", "final_output_type", "images",
    "latents", "trajectory_latents", "trajectory_timesteps", "trajectory_decoded",
    "multimodal_output", "custom_output", "metrics", "stage_durations", "peak_memory_mb", "error",
    "error_status_code", "error_type",
}  # fmt: skip


def test_public_fields_and_defaults():
    output = OmniRequestOutput("r1")
    assert {field.name for field in dataclasses.fields(output)} == PUBLIC
    assert (output.finished, output.final_output_type, output.error) == (True, "video", None)
    output.images.append(1)
    assert OmniRequestOutput("r2").images == []


def test_the_class_of_a_checkpoint(tmp_path):
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({"_class_name": "LingBotWorldCausalDMDPipeline"}))
    for path in (tmp_path, str(tmp_path)):
        assert get_model_class_name(path) == "LingBotWorldCausalDMDPipeline"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "model_index.json: cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "needs a string _class_name, got None"),
        ("{}", "needs a string _class_name, got None"),
        ('{"_class_name": 3}', "got 3"),
    ],
)
def test_broken_checkpoints_are_named(tmp_path, content, match):
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=match):
        get_model_class_name(tmp_path)
