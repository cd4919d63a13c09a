"""Requests for tests of the validator, and what a refusal must look like."""

import pytest
from PIL import Image

from vllm_omni.diffusion.models.lingbot_world.request import RequestPolicy, parse_request
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

PICTURE = Image.new("RGB", (96, 64), (10, 20, 30))
PROMPT = {"prompt": "A quiet harbour.", "multi_modal_data": {"image": PICTURE}}
SIZE = {"height": 64, "width": 96}
IDLE_CHUNK = [[], [], []]


def parse(prompt=None, policy=None, unbounded=None, **values):
    """Set the values afterwards: a client's JSON does not respect the annotations."""
    params = OmniDiffusionSamplingParams(**SIZE, num_frames=9)
    for name, value in values.items():
        setattr(params, name, value)
    return parse_request(
        PROMPT if prompt is None else prompt,
        params,
        RequestPolicy() if policy is None else policy,
        unbounded=unbounded,
    )


def refused(match, field, **arguments):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        parse(**arguments)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "invalid_request"
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def with_image(source):
    return {"prompt": "A harbour.", "multi_modal_data": {"image": source}}
