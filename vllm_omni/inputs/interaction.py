"""A client's interaction: its form, and what it means to an engine. No torch."""

import math
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, model_validator

from vllm_omni.diffusion.camera_motion import CameraMotion, CameraTarget, CameraVelocity
from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.errors import InteractionError, InvalidRequestError
from vllm_omni.inputs.checking import NUMBER, Checked, Count, Message, Prompt, Text, validate

MAX_EVENT_ID_CHARS = 256
CAMERA_FIELD = "multi_modal_data.camera"


class InteractionEvent(Message):
    """What happens: a new prompt, a camera movement, or both at once."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompt | None = Field(None, description="new prompt, not blank")
    multi_modal_data: dict[str, dict[str, JsonValue]] | None = Field(
        None,
        description="payload of each modality, for example camera: {mode: target or velocity, "
        "data: {translation: [x, y, z], rotation: [x, y, z, w]}}; +X right, +Y down, +Z forward",
    )
    negative_prompt: None = Field(None, description="must be absent or null")

    @model_validator(mode="before")
    @classmethod
    def _not_empty(cls, raw: object) -> object:
        if isinstance(raw, dict) and not raw.get("prompt") and not raw.get("multi_modal_data"):
            raise ValueError("needs a prompt or multi_modal_data")
        return raw


class Interaction(Message):
    """One event of a client. Fields are checked in this order; the first failure is reported."""

    event_id: Annotated[Text, Field(max_length=MAX_EVENT_ID_CHARS)] | None = Field(
        None, description="unique in the session; the server makes one if absent"
    )
    event: InteractionEvent
    transition_chunks: Count | None = Field(
        None, description="chunks over which the change is spread; prompt 3, camera target 1"
    )


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """An interaction that an engine can queue: a prompt, a camera motion, or both at once.

    Attributes:
        transition_chunks: how long the prompt blends and a camera target takes, in chunks;
            ``None`` for the default of each. A velocity ignores it.
    """

    event_id: str
    prompt: TokenizedPrompt | None = None
    camera: CameraMotion | None = None
    transition_chunks: int | None = None

    @property
    def modalities(self) -> frozenset[str]:
        """Names of what the event changes: the prompt, the camera, or both."""
        values = {"prompt": self.prompt, "camera": self.camera}
        return frozenset(name for name, value in values.items() if value is not None)


def control_event(
    interaction: Interaction,
    modalities: Collection[str],
    tokenize: Callable[[str], TokenizedPrompt],
) -> ControlEvent:
    """Read what an interaction means. With a prompt, this is not for an event loop.

    Args:
        modalities: what the model lets a client change, ``prompt`` and ``camera`` among them.

    Raises:
        InteractionError: for a modality or a payload that the model does not take.
    """
    prompt = interaction.event.prompt
    payloads = interaction.event.multi_modal_data or {}
    for modality in (*payloads, *(() if prompt is None else ("prompt",))):
        if modality not in modalities:
            raise InteractionError(
                f"modality {modality!r:.60} is not supported; supported: {', '.join(modalities)}",
                field="event.multi_modal_data",
            )
    return ControlEvent(
        event_id=interaction.event_id or uuid.uuid4().hex,
        prompt=None if prompt is None else tokenize(prompt),
        camera=parse_camera_payload(payloads["camera"]) if "camera" in payloads else None,
        transition_chunks=interaction.transition_chunks,
    )


# ------------------------------------------------------------------ the payload of a camera


def _unit(quaternion: tuple[float, ...]) -> tuple[float, ...]:
    largest = max(abs(component) for component in quaternion)
    if largest < 1e-12:
        raise ValueError("must not be the zero quaternion")
    # Scaled first, so that squares of small components do not vanish.
    scaled = [component / largest for component in quaternion]
    norm = math.sqrt(math.fsum(component * component for component in scaled))
    return tuple(component / norm for component in scaled)


_Component = Annotated[float, Field(strict=True, ge=-1e6, le=1e6), NUMBER]
"""Of a translation or quaternion; beyond these bounds float32 rays lose every digit."""
_Translation = Annotated[tuple[_Component, ...], Field(strict=False, min_length=3, max_length=3)]
_Rotation = Annotated[
    tuple[_Component, ...], Field(strict=False, min_length=4, max_length=4), AfterValidator(_unit)
]


class _CameraData(Checked):
    translation: _Translation = (0.0, 0.0, 0.0)
    rotation: _Rotation = (0.0, 0.0, 0.0, 1.0)

    @model_validator(mode="before")
    @classmethod
    def _only_motions(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        if "actions" in raw:
            raise ValueError(
                "actions: keys are not camera data; send the velocity or target they stand for"
            )
        return {name: value for name, value in raw.items() if value is not None}


class _CameraPayload(Checked):
    mode: Literal["target", "velocity", "absolute"] | None = None
    data: _CameraData


def parse_camera_payload(payload: Mapping[str, object]) -> CameraMotion:
    """Read ``multi_modal_data.camera`` of an interaction.

    ``{mode?: "target" | "velocity", data: {translation?: [x, y, z], rotation?: [x, y, z, w]}}``;
    the mode is "target" (another name of it is "absolute") and the motion zero where not given.

    Raises:
        InteractionError: naming the field that cannot be used.
    """
    try:
        camera = validate(_CameraPayload, payload, within=CAMERA_FIELD)
    except InvalidRequestError as error:
        text = str(error).removeprefix(f"{error.field}: ")
        raise InteractionError(text, field=error.field) from None
    kind = CameraVelocity if camera.mode == "velocity" else CameraTarget
    x, y, z = camera.data.translation
    qx, qy, qz, qw = camera.data.rotation
    return kind((x, y, z), (qx, qy, qz, qw))
