"""A client's interaction, from a mapping to a validated event."""

import math
import uuid
from collections.abc import Mapping

from vllm_omni.diffusion.camera_motion import CameraMotion, CameraTarget, CameraVelocity
from vllm_omni.diffusion.models.lingbot_world.request import normalise_prompt
from vllm_omni.engine.interactions import ControlEvent
from vllm_omni.entrypoints.server.protocol import SessionInteraction
from vllm_omni.entrypoints.server.wire import validate
from vllm_omni.errors import InteractionError

MODALITIES = ("prompt", "camera")
COMPONENT_LIMIT = 1e6
"""Largest translation or quaternion component; beyond it float32 rays lose every digit."""
CAMERA_FIELD = "multi_modal_data.camera"

_TARGET_MODES = ("target", "absolute")
_IDENTITY_XYZW = (0.0, 0.0, 0.0, 1.0)


def parse_interaction(raw: Mapping[str, object]) -> ControlEvent:
    """Validate ``{"event_id", "event", "transition_chunks"}`` of the Python API.

    Raises:
        InvalidRequestError: naming the field.
    """
    message = {"type": "session.interaction", "interaction": dict(raw)}
    return control_event_of(validate(SessionInteraction, message))


def control_event_of(message: SessionInteraction) -> ControlEvent:
    """Turn a well-formed wire message into an event that an engine can queue.

    Raises:
        InvalidRequestError: for a prompt, a modality or a payload that this model does not take.
    """
    interaction = message.interaction
    payloads = interaction.event.multi_modal_data or {}
    for modality in payloads:
        if modality != "camera":
            raise InteractionError(
                f"modality {modality!r:.60} is not supported; supported: {', '.join(MODALITIES)}",
                field="event.multi_modal_data",
            )
    prompt = interaction.event.prompt
    return ControlEvent(
        event_id=interaction.event_id or uuid.uuid4().hex,
        prompt=None if prompt is None else normalise_prompt(prompt, field="event.prompt"),
        camera=parse_camera_payload(payloads["camera"]) if "camera" in payloads else None,
        transition_chunks=interaction.transition_chunks,
    )


def parse_camera_payload(payload: object) -> CameraMotion:
    """Read ``multi_modal_data.camera`` of an interaction.

    ``{mode?: "target" | "velocity", data: {translation?: [x, y, z], rotation?: [x, y, z, w]}}``;
    the mode is "target" and the motion zero where not given.

    Raises:
        InteractionError: naming the field that cannot be used.
    """
    camera = _mapping(payload, CAMERA_FIELD, ("mode", "data"))
    mode = camera.get("mode")
    if mode is not None and mode not in (*_TARGET_MODES, "velocity"):
        raise InteractionError(
            f'must be "target" or "velocity", got {mode!r:.100}', field=f"{CAMERA_FIELD}.mode"
        )
    if camera.get("data") is None:
        raise InteractionError(
            "must hold translation and rotation, got nothing", field=f"{CAMERA_FIELD}.data"
        )
    field = f"{CAMERA_FIELD}.data"
    if isinstance(camera["data"], Mapping) and "actions" in camera["data"]:
        raise InteractionError(
            "keys are not camera data; send the velocity or target they stand for",
            field=f"{field}.actions",
        )
    data = _mapping(camera["data"], field, ("translation", "rotation"))
    x, y, z = _numbers(data.get("translation"), (0.0, 0.0, 0.0), f"{field}.translation")
    rotation = _unit_quaternion(data.get("rotation"), f"{field}.rotation")
    kind = CameraVelocity if mode == "velocity" else CameraTarget
    return kind((x, y, z), rotation)


def _mapping(value: object, field: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InteractionError(f"must be an object, got {type(value).__name__}", field=field)
    for name in value:
        if name not in known:
            raise InteractionError(
                f"unknown key {name!r:.100}; known are {', '.join(known)}", field=field
            )
    return value


def _numbers(value: object, default: tuple[float, ...], field: str) -> tuple[float, ...]:
    if value is None:
        return default
    if not isinstance(value, list | tuple) or len(value) != len(default):
        got = len(value) if isinstance(value, list | tuple) else type(value).__name__
        raise InteractionError(f"must be {len(default)} numbers, got {got}", field=field)
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InteractionError(f"must hold numbers, got {number!r:.100}", field=field)
        # Compared, not converted: an integer may be too large for a float.
        if not -COMPONENT_LIMIT <= number <= COMPONENT_LIMIT:
            got = f"{number}" if isinstance(number, float) else "a larger integer"
            raise InteractionError(
                f"must hold finite numbers within +-{COMPONENT_LIMIT:g}, got {got}", field=field
            )
    return tuple(float(number) for number in value)


def _unit_quaternion(value: object, field: str) -> tuple[float, float, float, float]:
    components = _numbers(value, _IDENTITY_XYZW, field)
    largest = max(abs(component) for component in components)
    if largest < 1e-12:
        raise InteractionError("must not be the zero quaternion", field=field)
    # Scaled first, so that squares of small components do not vanish.
    scaled = [component / largest for component in components]
    norm = math.sqrt(math.fsum(component * component for component in scaled))
    x, y, z, w = (component / norm for component in scaled)
    return x, y, z, w
