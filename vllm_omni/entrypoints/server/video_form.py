"""Bodies of ``POST /v1/videos``: forms and JSON, both as the start message of a session.

The fields are those of ``session.start``, so both ways into the server mean the same by them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import ImmutableMultiDict, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from vllm_omni.entrypoints.server.http_errors import ClientLeftError, HttpRefusalError
from vllm_omni.entrypoints.server.protocol import load_json, load_object, repeated
from vllm_omni.entrypoints.server.request_ids import current_request_id
from vllm_omni.entrypoints.server.start import PREENCODED, SessionStart
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import require_few_values, validate
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

MAX_BODY_BYTES = 64 * 2**20
"""Bytes of a body, picture included."""
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send its body."""
_MAX_TEXT_BYTES = 48 * 2**20
_MAX_PARTS = 100

_UPLOAD = "input_reference"
_OBJECT_FIELDS = (
    "image_reference", "video_params", "extra_params", "sampling_params", "lora",
)  # fmt: skip
_OTHER_MODELS = (
    "video_reference", "audio_reference", "input_references", "control_reference", "control_type",
    "source_video", "source_audio", "mask", "masks",
)  # fmt: skip
_OF_STREAMS = ("format", "queue", "unbounded", "max_lead_ms")
_KNOWN = frozenset({*SessionStart.model_fields, _UPLOAD, *_OTHER_MODELS})
_MOST_NAMED = 10
_MOST_NAME_CHARS = 60
_URL_ENCODED = "application/x-www-form-urlencoded"
_TYPES = ("application/json", "multipart/form-data", _URL_ENCODED)


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body that was read.

    Attributes:
        ignored: names of fields that nothing here knows, as the client wrote them.
    """

    start: SessionStart
    ignored: tuple[str, ...] = ()

    @property
    def warnings(self) -> dict[str, str]:
        """Header that tells a client what was ignored."""
        if not self.ignored:
            return {}
        listed = ", ".join(_plain(name) for name in self.ignored[:_MOST_NAMED])
        more = "" if len(self.ignored) <= _MOST_NAMED else ", ..."
        return {"Warning": f'199 vllm-omni "unknown fields were ignored: {listed}{more}"'}


async def read_body(request: Request, state: ServerState) -> ReadBody:
    """The body of a request as a start message, and what of it means nothing here.

    Raises:
        HttpRefusalError: 400 for a form that contradicts itself, 408 for a client that is too
            slow, 413 for a body that is too large, 415 for another media type, 422 for fields
            that break the schema.
        ClientLeftError: if the body ends early.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            fields = await _read_fields(request, state)
    except TimeoutError:
        raise HttpRefusalError(
            408, f"the body was not complete within {BODY_TIMEOUT_S:.0f} s"
        ) from None
    except ClientDisconnect:
        raise ClientLeftError from None
    start = await state.in_thread(start_of, fields)
    unknown = tuple(name for name in fields if name not in _KNOWN)
    if unknown:
        named = ", ".join(map(_plain, unknown[:_MOST_NAMED]))
        logger.warning("%s: unknown fields were ignored: %s", current_request_id(), named)
    return ReadBody(start, unknown)


def _plain(name: str) -> str:
    """A client's name for a field, as a header can carry it."""
    return quote(name[:_MOST_NAME_CHARS], safe="_-.")


def start_of(fields: Mapping[str, object]) -> SessionStart:
    """Fields of a form or a JSON object as a start message.

    Numbers may be text, objects may be JSON texts, an empty text is a field that was not given.
    The picture is an upload (bytes) or a URL under ``input_reference``, or ``image_reference``.

    Raises:
        HttpRefusalError: see :func:`read_body`.
    """
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    _check_names(given)
    for name in _OBJECT_FIELDS:
        if isinstance(given.get(name), str):
            given[name] = _json_object(name, given[name])
        if isinstance(options := given.get(name), dict):
            # Models that encode while they generate take it; a whole video is encoded here anyway.
            given[name] = {key: options[key] for key in options if key != PREENCODED}
    if _UPLOAD in given:
        given["image_reference"] = _reference(given.pop(_UPLOAD))
    picture = given.get("image_reference")
    if isinstance(picture, dict) and picture.get("file_id") is not None:
        raise _refused("image_reference", "file_id is not supported; give image_url")
    try:
        return validate(SessionStart, {**given, "type": "session.start"}, written=True)
    except InvalidRequestError as error:
        raise HttpRefusalError(422, str(error), field=error.field) from None


def _check_names(given: Mapping[str, object]) -> None:
    if _UPLOAD in given and ("image_reference" in given or "video_reference" in given):
        raise _refused(_UPLOAD, "give one of input_reference, image_reference and video_reference")
    for name in _OTHER_MODELS:
        if name in given:
            raise _refused(name, "is not supported by this model; leave it out")
    for name in _OF_STREAMS:
        if name in given:
            raise _refused(name, "is for /v1/realtime/video; a video here has a fixed length")


def body_schema() -> dict[str, Any]:
    """OpenAPI's ``requestBody`` of the two POST routes."""
    schema = SessionStart.model_json_schema(ref_template="#/components/schemas/{model}")
    fields = {n: f for n, f in schema["properties"].items() if n not in {"type", *_OF_STREAMS}}
    for name in ("image_reference", "video_params"):
        fields[name] = {"type": "object", "description": _DESCRIPTIONS[name]}
    upload = {"type": "string", "format": "binary", "description": "first picture, as a file"}
    body = {"type": "object", "required": ["prompt"], "properties": fields}
    form = body | {"properties": fields | {_UPLOAD: upload}}
    content = {"multipart/form-data": form, "application/json": body}
    content = {kind: {"schema": one, "example": _EXAMPLE} for kind, one in content.items()}
    return {"requestBody": {"required": True, "content": content}}


_EXAMPLE = {
    "prompt": "A quiet harbour at dawn.",
    "size": "832x480",
    "num_frames": 81,
    "fps": 16,
    "seed": 7,
    "image_reference": {"image_url": "https://example.com/harbour.png"},
}
_DESCRIPTIONS = {
    "image_reference": "{image_url: data: or http(s) URL}; in a form, as JSON text",
    "video_params": "{width, height, num_frames, fps}; fall-back of the fields of these names",
}


async def _read_fields(request: Request, state: ServerState) -> Mapping[str, object]:
    limited = Request(request.scope, _limited(request.receive))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        raise HttpRefusalError(415, f"the body must be {' or '.join(_TYPES)}, got {kind!r:.60}")
    if kind == "application/json":
        body = await limited.body()
        return await state.in_thread(_json_body, body)
    if kind == _URL_ENCODED:
        # Its parser calls back for every separator, and runs on the event loop.
        body = await limited.body()
        if body.count(b"&") + body.count(b";") > _MAX_PARTS:
            raise HttpRefusalError(400, f"the form has more than {_MAX_PARTS} fields")
    try:
        form = await limited.form(max_files=2, max_fields=_MAX_PARTS, max_part_size=_MAX_TEXT_BYTES)
    except HTTPException as error:
        raise HttpRefusalError(400, f"the form cannot be read: {error.detail!s:.200}") from None
    try:
        refuse_repeated(form)
        return {
            name: await value.read() if isinstance(value, UploadFile) else value
            for name, value in form.items()
        }
    finally:
        await form.close()


def refuse_repeated(given: ImmutableMultiDict[str, Any]) -> None:
    """Refuse names that a form or the query of a URL holds twice.

    Raises:
        HttpRefusalError: 400, naming the first one.
    """
    twice = repeated(name for name, _ in given.multi_items())
    if twice is not None:
        raise _refused(f"{twice:.100}", "is given twice")


def _limited(receive: Receive) -> Receive:
    """Receive a body, but not more than the limit."""
    left = MAX_BODY_BYTES

    async def receive_limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HttpRefusalError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return message

    return receive_limited


def _json_body(body: bytes) -> dict[str, object]:
    try:
        return load_object(body.decode("utf-8"), limit=MAX_BODY_BYTES)
    except UnicodeDecodeError:
        raise HttpRefusalError(400, "the body is not valid UTF-8") from None


def _json_object(name: str, text: object) -> object:
    require_few_values(str(text), field=name)
    try:
        return load_json(str(text))
    except (ValueError, RecursionError) as error:
        raise _refused(name, f"is not valid JSON: {error!s:.120}") from None


def _reference(upload: object) -> object:
    """An upload as the data URL of its bytes; a URL as itself."""
    if isinstance(upload, bytes):
        encoded = base64.b64encode(upload).decode("ascii")
        return {"image_url": f"data:application/octet-stream;base64,{encoded}"}
    return {"image_url": upload} if isinstance(upload, str) else upload


def _refused(name: str, message: str) -> HttpRefusalError:
    return HttpRefusalError(400, f"{name}: {message}", field=name)
