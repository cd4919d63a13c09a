"""Every message of ``/v1/realtime/video``, in both directions, and their parsing.

A message is a JSON object in a text frame; video travels in binary frames, each right after its
``video.chunk_metadata``. ``docs/reference/websocket_protocol.md`` is generated from this module.
"""

import json
from collections.abc import Iterable
from typing import ClassVar, Literal, get_args

from pydantic import Field, JsonValue
from pydantic.json_schema import models_json_schema

from vllm_omni.entrypoints.server.start import ImageReference, SessionStart
from vllm_omni.errors import InvalidRequestError, OmniError
from vllm_omni.inputs.checking import Message, Prompt, Seed, require_few_values, validate
from vllm_omni.inputs.interaction import Interaction

MAX_START_CHARS = 4_194_304
"""Characters of ``session.start``, picture included."""
MAX_CONTROL_CHARS = 131_072
"""Characters of any later message of a client."""


# ------------------------------------------------------------------ client to server


class SessionPing(Message):
    """Keeps an otherwise idle session alive; answered by ``session.pong``."""

    type: Literal["session.ping"] = "session.ping"


class SessionStop(Message):
    """Ends the rollout at the next chunk boundary; answered by ``session.done``."""

    type: Literal["session.stop"] = "session.stop"


class SessionInteraction(Message):
    """Steers the world from the next chunk boundary on; refusals leave the session running."""

    type: Literal["session.interaction"] = "session.interaction"
    interaction: Interaction


class SessionReset(Message):
    """Restarts the world from chunk 0 at the next chunk boundary; equal to a fresh session."""

    type: Literal["session.reset"] = "session.reset"
    prompt: Prompt | None = Field(None, description="the current prompt if absent")
    image_reference: ImageReference | None = Field(None, description="the first picture if absent")
    seed: Seed | None = Field(None, description="the first seed if absent")


ControlMessage = SessionPing | SessionStop | SessionInteraction | SessionReset


# ------------------------------------------------------------------ server to client


class _ServerMessage(Message):
    left_out: ClassVar[frozenset[str]] = frozenset()
    """Fields that do not appear on the wire while they are ``None``."""

    def to_text(self) -> str:
        """The message as it is sent."""
        values = self.__dict__
        return self.model_dump_json(exclude={n for n in self.left_out if values[n] is None})


class Capabilities(Message):
    """What this server can do; also at ``GET /v1/realtime/capabilities``."""

    height: int | None = Field(description="pixels of a session that names no size")
    width: int | None = Field(description="pixels; null where the picture decides")
    frames_first_chunk: int = Field(description="pixel frames")
    frames_per_chunk: int = Field(description="pixel frames of each other chunk")
    native_fps: float = Field(
        description="the model's rate, at which a chunk of 12 frames plays 12 / native_fps seconds"
    )
    max_prompt_tokens: int
    modalities: list[str] = Field(description="what session.interaction may carry")
    max_sessions: int = Field(description="worlds that are generated at the same time")


class SessionQueued(_ServerMessage):
    """Place in the waiting line (1 is next); only with ``queue: true``, before ``video.start``."""

    type: Literal["session.queued"] = "session.queued"
    request_id: str
    position: int = Field(ge=1)


class VideoStart(_ServerMessage):
    """The start message was understood; sent before the picture is decoded."""

    left_out: ClassVar[frozenset[str]] = frozenset({"capabilities"})

    type: Literal["video.start"] = "video.start"
    request_id: str
    format: Literal["m4s"] = "m4s"
    config: dict[str, JsonValue] = Field(
        description="the request as understood, without nulls; "
        "its picture, too, whose data: URL may have millions of characters"
    )
    capabilities: Capabilities | None = None


class VideoChunkMetadata(_ServerMessage):
    """Describes the binary frame that follows at once."""

    left_out: ClassVar[frozenset[str]] = frozenset({"server_ready_ms", "applied"})

    type: Literal["video.chunk_metadata"] = "video.chunk_metadata"
    request_id: str
    kind: Literal["media", "trailer"] = "media"
    num_frames: int = Field(ge=0, description="pixel frames: 9, then 12; 0 for a trailer")
    byte_length: int = Field(ge=0)
    generation_chunk_index: int | None = Field(description="from 0; null for a trailer")
    started_event_ids: list[str] = Field(default_factory=list)
    active_event_ids: list[str] = Field(default_factory=list)
    completed_event_ids: list[str] = Field(default_factory=list)
    transport_chunk_index: int = Field(ge=0, description="0, 1, 2, ... over all binary frames")
    server_ready_ms: float | None = Field(
        None, description="when the worker had the pixels, since video.start was sent"
    )
    applied: dict[str, int] | None = Field(
        None, description="latent frame of the rollout at which each event took effect"
    )


class SessionInteractionQueued(_ServerMessage):
    """An interaction was accepted; it takes effect at the next chunk boundary."""

    type: Literal["session.interaction.queued"] = "session.interaction.queued"
    request_id: str
    event_id: str


class SessionResetDone(_ServerMessage):
    """The next chunk is chunk 0 of the restarted world."""

    type: Literal["session.reset.done"] = "session.reset.done"
    request_id: str


class SessionPong(_ServerMessage):
    """The answer of the server to ``session.ping``."""

    type: Literal["session.pong"] = "session.pong"


class SessionDone(_ServerMessage):
    """The rollout ended; the socket is closed with 1000 afterwards."""

    type: Literal["session.done"] = "session.done"
    request_id: str
    chunks: int = Field(ge=0, description="binary frames sent, trailer included")
    stopped: bool = Field(description="whether it ended before its length")


class ErrorMessage(_ServerMessage):
    """A refusal or a failure; the session goes on unless the socket is closed after it."""

    left_out: ClassVar[frozenset[str]] = frozenset({"code", "request_id", "event_id"})

    type: Literal["error"] = "error"
    message: str
    code: str | None = Field(
        None,
        description="event_id_conflict, interaction_failed, invalid_request, server_full, "
        "server_draining, worker_restarted, out_of_memory or client_too_slow",
    )
    request_id: str | None = None
    event_id: str | None = None

    @classmethod
    def of(
        cls, error: OmniError, *, request_id: str | None = None, event_id: str | None = None
    ) -> "ErrorMessage":
        """The message that tells a client about ``error``."""
        return cls(message=str(error), code=error.code, request_id=request_id, event_id=event_id)


ServerMessage = (
    SessionQueued | VideoStart | VideoChunkMetadata | SessionInteractionQueued
    | SessionResetDone | SessionPong | SessionDone | ErrorMessage
)  # fmt: skip

CLIENT_MESSAGES: tuple[type[Message], ...] = (SessionStart, *get_args(ControlMessage))
SERVER_MESSAGES: tuple[type[Message], ...] = get_args(ServerMessage)


# ------------------------------------------------------------------ parsing


def type_of(model: type[Message]) -> str:
    """Value of the ``type`` field of a message class."""
    return get_args(model.model_fields["type"].annotation)[0]


_CONTROLS: dict[str, type[ControlMessage]] = {
    type_of(model): model for model in get_args(ControlMessage)
}


def parse_start(text: str) -> SessionStart:
    """The first message of a client.

    Raises:
        InvalidRequestError: names the field that is wrong. The session ends.
    """
    raw = load_object(text, limit=MAX_START_CHARS)
    if raw.get("type") != "session.start":
        raise InvalidRequestError(
            f"the first message must be session.start, got {raw.get('type')!r:.60}", field="type"
        )
    return validate(SessionStart, raw, written=True)


def parse_control(text: str) -> ControlMessage:
    """Any later message of a client.

    Raises:
        InvalidRequestError: names the field that is wrong. The session goes on.
    """
    raw = load_object(text, limit=MAX_CONTROL_CHARS)
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in _CONTROLS:
        raise InvalidRequestError(
            f"Unknown message type {kind!r:.60}; expected one of {', '.join(_CONTROLS)}"
        )
    return validate(_CONTROLS[kind], raw, written=True)


def load_object(text: str, *, limit: int) -> dict[str, object]:
    """The JSON object in ``text``, which may have at most ``limit`` characters.

    Raises:
        InvalidRequestError: too long, too many values, not JSON (NaN and Infinity are not JSON),
            or no object.
    """
    if len(text) > limit:
        raise InvalidRequestError(
            f"the message has {len(text)} characters, at most {limit} are accepted"
        )
    require_few_values(text)
    try:
        loaded = load_json(text)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the message is not valid JSON: {error!s:.120}") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError(f"the message must be a JSON object, got {type(loaded).__name__}")
    return loaded


def load_json(text: str) -> object:
    """The value that a JSON text stands for.

    Raises:
        InvalidRequestError: if an object of it names a field twice.
        ValueError, RecursionError: if it is not JSON, or too deep.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these pairs; which of two values is meant, nobody knows."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequestError("is given twice", field=f"{repeated(n for n, _ in pairs):.100}")
    return found


def repeated(names: Iterable[str]) -> str | None:
    """The first of some names that comes a second time, if one does."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def protocol_schema() -> dict[str, JsonValue]:
    """JSON schema of all messages: ``$defs`` by class, and the two unions of them."""
    models = CLIENT_MESSAGES + SERVER_MESSAGES
    _, schema = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/$defs/{model}"
    )
    definitions = schema["$defs"]
    for name, members in (("ClientMessage", CLIENT_MESSAGES), ("ServerMessage", SERVER_MESSAGES)):
        definitions[name] = {"oneOf": [{"$ref": f"#/$defs/{m.__name__}"} for m in members]}
        for member in members:
            definitions[member.__name__]["required"] = sorted(
                {"type", *definitions[member.__name__].get("required", [])}
            )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of /v1/realtime/video",
        "anyOf": [{"$ref": "#/$defs/ClientMessage"}, {"$ref": "#/$defs/ServerMessage"}],
        "$defs": definitions,
    }
