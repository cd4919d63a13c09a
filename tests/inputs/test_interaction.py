"""Camera payloads of interactions: defaults, and errors that name their field."""

import math

import pytest

from vllm_omni.diffusion.camera_motion import CameraTarget, CameraVelocity
from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.errors import InteractionError, InvalidRequestError
from vllm_omni.inputs.checking import validate
from vllm_omni.inputs.interaction import Interaction, control_event, parse_camera_payload

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

IDENTITY = (0.0, 0.0, 0.0, 1.0)


def test_payloads_are_read_with_their_defaults():
    assert parse_camera_payload({"data": {}}) == CameraTarget((0.0, 0.0, 0.0), IDENTITY)
    assert parse_camera_payload({"mode": None, "data": {"translation": [1, 2, 3]}}) == CameraTarget(
        (1.0, 2.0, 3.0), IDENTITY
    )
    assert parse_camera_payload({"mode": "absolute", "data": {}}) == CameraTarget(
        (0.0, 0.0, 0.0), IDENTITY
    )
    velocity = parse_camera_payload({"mode": "velocity", "data": {"rotation": [0, 3, 0, 4]}})
    assert velocity == CameraVelocity((0.0, 0.0, 0.0), (0.0, 0.6, 0.0, 0.8))
    tiny = parse_camera_payload({"data": {"rotation": [0, 0, 0, 1e-9]}})
    assert tiny.rotation == IDENTITY


CAMERA = "multi_modal_data.camera"


@pytest.mark.parametrize(
    ("payload", "field", "message"),
    [
        ({"mode": "orbit", "data": {}}, ".mode", 'target, velocity or absolute, got "orbit"'),
        ({"mode": ["target"], "data": {}}, ".mode", r'got \["target"\]'),
        ({"mode": "velocity"}, ".data", "is required"),
        ({"data": 3}, ".data", "must be a mapping of names to values, got 3"),
        ({"data": {"actions": ["w"]}}, ".data", "actions: keys are not camera data"),
        ({"data": {"translaton": [0, 0, 0]}}, ".data", "unknown key 'translaton'"),
        ({"speed": 1, "data": {}}, "", "unknown key 'speed'"),
        ({"data": {"translation": [0, 0]}}, ".data.translation", r"at least 3 items, got \[0, 0\]"),
        ({"data": {"translation": "abc"}}, ".data.translation", "must be a list, got"),
        ({"data": {"rotation": [0, 0, 1]}}, ".data.rotation", r"at least 4 items, got \[0, 0, 1\]"),
        ({"data": {"rotation": [0, 0, 0, 0]}}, ".data.rotation", "zero quaternion"),
        ({"data": {"translation": [0, math.nan, 0]}}, ".data.translation.1", "finite.*NaN"),
        ({"data": {"translation": [0, -1e7, 0]}}, ".data.translation.1", "at least -1000000"),
        (
            {"data": {"translation": [10**5000, 0, 0]}},
            ".data.translation.0",
            "must be a number, got a value of type int",
        ),
        ({"data": {"translation": [True, 0, 0]}}, ".data.translation.0", "a number, got true"),
        ({"data": {"rotation": [0, 0, 0, "1"]}}, ".data.rotation.3", 'a number, got "1"'),
    ],
)
def test_payloads_that_cannot_be_used_name_their_field(payload, field, message):
    with pytest.raises(InteractionError, match=message) as caught:
        parse_camera_payload(payload)
    assert caught.value.field == f"{CAMERA}{field}"
    assert len(str(caught.value)) < 300


def read(raw, modalities=("prompt", "camera")):
    return control_event(validate(Interaction, raw), modalities, TokenizedPrompt)


def test_an_event_changes_what_it_holds():
    walk = {"mode": "velocity", "data": {"translation": [0, 0, 1]}}
    both = {"prompt": " a  b ", "multi_modal_data": {"camera": walk}}
    event = read({"event_id": "e", "event": both, "transition_chunks": 2})
    assert (event.event_id, event.prompt.text, event.transition_chunks) == ("e", "a b", 2)
    assert event.camera == CameraVelocity((0.0, 0.0, 1.0), IDENTITY)
    assert event.modalities == {"prompt", "camera"}
    assert read({"event": {"prompt": "a"}}).modalities == {"prompt"}
    made = {read({"event": {"prompt": "a"}}).event_id for _ in range(3)}
    assert len(made) == 3


@pytest.mark.parametrize(
    ("event", "modalities", "words"),
    [
        ({"multi_modal_data": {"camra": {}}}, ("prompt", "camera"), "'camra' is not supported"),
        ({"prompt": "a"}, ("camera",), "'prompt' is not supported; supported: camera"),
        ({"multi_modal_data": {"camera": {"data": {}}}}, (), "'camera' is not supported"),
    ],
)
def test_what_the_model_does_not_take_is_refused(event, modalities, words):
    with pytest.raises(InteractionError, match=words) as caught:
        read({"event": event}, modalities)
    assert caught.value.code == "interaction_failed"


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({}, "event"),
        ({"event": {}}, "event"),
        ({"event": {"prompt": "\ud83d"}}, "event.prompt"),
        ({"event": {"prompt": "a", "\ud83d": 1}}, "event"),
        ({"event_id": "x" * 257, "event": {"prompt": "a"}}, "event_id"),
        ({"event": {"prompt": "x" * 40_000}}, "event.prompt"),
    ],
)
def test_what_has_another_form_is_refused(raw, field):
    with pytest.raises(InvalidRequestError) as caught:
        read(raw)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
