"""What a server says, parsed, and what its errors mean."""

from typing import cast

from vllm_omni.client.errors import ProtocolError, WorldRefusedError
from vllm_omni.entrypoints.server.protocol import (
    MAX_START_CHARS,
    SERVER_MESSAGES,
    ErrorMessage,
    ServerMessage,
    load_object,
    type_of,
)
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import validate

_ANSWERS = {type_of(message): message for message in SERVER_MESSAGES}
_MAX_CHARS = 2 * MAX_START_CHARS
_LEFT_OUT: dict[str, dict[str, object]] = {
    "video.start": {"request_id": "", "config": {}},
    "video.chunk_metadata": {"request_id": "", "transport_chunk_index": 0, "num_frames": 0},
    "session.done": {"request_id": "", "chunks": 0, "stopped": False},
}
"""What servers of older releases may leave out."""
_OF_EVENTS = frozenset({"event_id_conflict", "interaction_failed"})
"""Codes of errors that never end a world."""


def parsed(text: str) -> ServerMessage | None:
    """A message of a server, ``None`` for a kind that this client does not know.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        raw = load_object(text, limit=_MAX_CHARS)
        kind = str(raw.get("type"))
        if kind not in _ANSWERS:
            return None
        filled = _LEFT_OUT.get(kind, {}) | raw
        return cast(ServerMessage, validate(_ANSWERS[kind], filled, written=True))
    except InvalidRequestError as error:
        raise ProtocolError(f"the server sent no message of this protocol: {error}") from error


def is_of_an_event(message: ErrorMessage) -> bool:
    """Whether an error is about one event alone, so that the world goes on."""
    return message.event_id is not None or message.code in _OF_EVENTS


def refused(message: ErrorMessage) -> WorldRefusedError:
    """The error to raise for one that ends a world."""
    return WorldRefusedError(message.message, code=message.code)
