"""Requests for tests of the door, and what a refusal must look like."""

from dataclasses import replace

import pytest
from PIL import Image

from vllm_omni.diffusion.messages import SessionRequest, TokenizedPrompt
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.data import NAMES, OmniDiffusionSamplingParams, rollout_fields
from vllm_omni.inputs.picture import load_image
from vllm_omni.inputs.request import Door, RequestLimits, RequestPolicy

PICTURE = Image.new("RGB", (96, 64), (10, 20, 30))
PROMPT = {"prompt": "A quiet harbour.", "multi_modal_data": {"image": PICTURE}}
SIZE = {"height": 64, "width": 96}
IDLE_CHUNK = [[], [], []]
POLICY = RequestPolicy(
    RequestLimits(inference_steps=4, max_sequence_length=512, native_fps=16.0, area=480 * 832)
)


def policy(**changes):
    """What a deployment without settings allows, but for some."""
    return replace(POLICY, **changes)


def parse(prompt=None, policy=POLICY, unbounded=None, **values) -> SessionRequest:
    """Set the values afterwards: a client's JSON does not respect the annotations."""
    params = OmniDiffusionSamplingParams(**SIZE, num_frames=9)
    for name, value in values.items():
        setattr(params, name, value)
    door = Door(policy, lambda _: None, load_image, TokenizedPrompt, NAMES)
    given = rollout_fields(PROMPT if prompt is None else prompt, params)
    request = door.check(given | {"unbounded": unbounded})
    return door.complete(request, door.picture(request.image))


def refused(match, field, **arguments):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        parse(**arguments)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "invalid_request"
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def with_image(source):
    return {"prompt": "A harbour.", "multi_modal_data": {"image": source}}
