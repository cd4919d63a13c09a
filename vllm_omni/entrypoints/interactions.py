"""A client's interaction, from a mapping to a validated event."""

import uuid
from collections.abc import Mapping

from vllm_omni.diffusion.models.lingbot_world.request import normalise_prompt
from vllm_omni.engine.camera_pose import parse_camera_payload
from vllm_omni.engine.interactions import Interaction
from vllm_omni.entrypoints.server.protocol import SessionInteraction
from vllm_omni.entrypoints.server.wire import validate
from vllm_omni.errors import InteractionError

MODALITIES = ("prompt", "camera")


def parse_interaction(raw: Mapping[str, object]) -> Interaction:
    """Validate ``{"event_id", "event", "transition_chunks"}`` of the Python API.

    Raises:
        InvalidRequestError: naming the field.
    """
    message = {"type": "session.interaction", "interaction": dict(raw)}
    return interaction_of(validate(SessionInteraction, message))


def interaction_of(message: SessionInteraction) -> Interaction:
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
    return Interaction(
        event_id=interaction.event_id or uuid.uuid4().hex,
        prompt=None if prompt is None else normalise_prompt(prompt, field="event.prompt"),
        camera=parse_camera_payload(payloads["camera"]) if "camera" in payloads else None,
        transition_chunks=interaction.transition_chunks,
    )
