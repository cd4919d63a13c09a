"""A deployment with its engine: what it allows, and figures at hand."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from tests.helpers.http_server import tiny_deployment
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def test_metrics_hold_those_of_the_process():
    client = EngineClient.create(tiny_deployment(), model_name="world", warm_up=False)
    text = generate_latest(client.engine.metrics.registry).decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "python_info"):
        assert f"\n{name}" in text
    assert 'vllm_omni:num_requests_running{model_name="world"}' in text


def test_the_door_allows_what_the_deployment_says():
    client = EngineClient.create(tiny_deployment(), model_name="world", warm_up=False)
    config = client.deployment.config
    door = client.door({"image": "picture"}, max_pixels=7)
    policy = door.policy
    assert (policy.geometry, policy.parallel, policy.max_pixels) == (
        config.geometry,
        config.parallel,
        7,
    )
    assert policy.array_output is OutputKind.UINT8
    assert policy.allow_live_camera
    assert policy.defaults == {
        "num_inference_steps": 4, "output_type": "pil", "extra_args": {"flow_shift": 5.0},
    }  # fmt: skip
    with pytest.raises(InvalidRequestError, match="picture: is required"):
        door.check({"prompt": "a", "num_frames": 9})


def test_a_deployment_of_clips():
    deployment = replace(tiny_deployment(), streaming_output=False, step_execution=False)
    policy = EngineClient.create(deployment, model_name="world", warm_up=False).door({}).policy
    assert policy.array_output is OutputKind.FLOAT
    assert not policy.allow_live_camera
