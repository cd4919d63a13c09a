"""Camera payloads of interactions: defaults, and errors that name their field."""

import math

import pytest

from vllm_omni.diffusion.camera_motion import CameraTarget, CameraVelocity
from vllm_omni.entrypoints.interactions import parse_camera_payload
from vllm_omni.errors import InteractionError

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
        (None, "", "must be an object, got NoneType"),
        ([1], "", "must be an object, got list"),
        ({"mode": "orbit", "data": {}}, ".mode", "got 'orbit'"),
        ({"mode": ["target"], "data": {}}, ".mode", "got \\['target'\\]"),
        ({"mode": "velocity"}, ".data", "got nothing"),
        ({"data": 3}, ".data", "got int"),
        ({"data": {"actions": ["w"]}}, ".data.actions", "keys are not camera data"),
        ({"data": {"translaton": [0, 0, 0]}}, ".data", "unknown key 'translaton'"),
        ({"speed": 1, "data": {}}, "", "unknown key 'speed'"),
        ({"data": {"translation": [0, 0]}}, ".data.translation", "must be 3 numbers, got 2"),
        ({"data": {"translation": "abc"}}, ".data.translation", "3 numbers, got str"),
        ({"data": {"rotation": [0, 0, 1]}}, ".data.rotation", "must be 4 numbers, got 3"),
        ({"data": {"rotation": [0, 0, 0, 0]}}, ".data.rotation", "zero quaternion"),
        ({"data": {"translation": [0, math.nan, 0]}}, ".data.translation", "finite.*got nan"),
        ({"data": {"translation": [0, -math.inf, 0]}}, ".data.translation", "finite.*got -inf"),
        (
            {"data": {"translation": [10**5000, 0, 0]}},
            ".data.translation",
            "1e\\+06, got a larger integer",
        ),
        ({"data": {"translation": [True, 0, 0]}}, ".data.translation", "numbers, got True"),
        ({"data": {"rotation": [0, 0, 0, "1"]}}, ".data.rotation", "numbers, got '1'"),
    ],
)
def test_payloads_that_cannot_be_used_name_their_field(payload, field, message):
    with pytest.raises(InteractionError, match=message) as caught:
        parse_camera_payload(payload)
    assert caught.value.field == f"{CAMERA}{field}"
    assert len(str(caught.value)) < 300
