"""A deployment with its engine: a request is filled from its defaults, figures are at hand."""

import dataclasses

import pytest
from prometheus_client import generate_latest

from tests.helpers.local_server import tiny_deployment
from vllm_omni.diffusion.data import SamplingDefaults
from vllm_omni.entrypoints.engine_client import EngineClient, with_defaults
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

DEFAULTS = {
    "num_inference_steps": 4, "max_sequence_length": 512, "height": 64, "width": 96,
    "num_frames": 21, "seed": 5, "fps": 16.0, "output_type": "pil", "num_outputs_per_prompt": 2,
    "generator_device": "cpu",
}  # fmt: skip
ASKED = {
    "num_inference_steps": 3, "max_sequence_length": 8, "height": 32, "width": 48,
    "num_frames": 9, "seed": 0, "fps": 24, "output_type": "np", "num_outputs_per_prompt": 3,
    "generator_device": "npu",
}  # fmt: skip


def test_metrics_hold_those_of_the_process():
    client = EngineClient.create(tiny_deployment(), model_name="world", warm_up=False)
    text = generate_latest(client.engine.metrics.registry).decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "python_info"):
        assert f"\n{name}" in text
    assert 'vllm_omni:num_requests_running{model_name="world"}' in text


def values(params: OmniDiffusionSamplingParams) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(params).items() if name in DEFAULTS}


def test_every_default_is_covered():
    names = {field.name for field in dataclasses.fields(SamplingDefaults)}
    assert names == {*DEFAULTS, "extra_args"}


def test_what_is_left_out_is_filled():
    filled = with_defaults(OmniDiffusionSamplingParams(), SamplingDefaults(**DEFAULTS))
    assert values(filled) == DEFAULTS


def test_what_is_asked_for_wins():
    asked = OmniDiffusionSamplingParams(**ASKED)
    assert values(with_defaults(asked, SamplingDefaults(**DEFAULTS))) == ASKED


def test_no_defaults_change_nothing():
    asked = OmniDiffusionSamplingParams(guidance_scale=2.0, extra_args={"a": 1})
    assert with_defaults(asked, SamplingDefaults()) == asked


def test_extra_arguments_merge_key_by_key():
    asked = OmniDiffusionSamplingParams(extra_args={"a": 1})
    defaults = SamplingDefaults(extra_args={"a": 2, "b": 3})
    assert with_defaults(asked, defaults).extra_args == {"a": 1, "b": 3}
    assert asked.extra_args == {"a": 1}
