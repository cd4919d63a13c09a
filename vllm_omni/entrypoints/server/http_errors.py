"""Errors as HTTP answers: one body, one table of statuses; and what is counted of refused requests.

A request that ends before it is a session is counted by its reason, and is in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import StopCause
from vllm_omni.entrypoints.server.channel import ClientGoneError
from vllm_omni.entrypoints.server.request_ids import HEADER, current_request_id
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.errors import (
    DeviceOutOfMemoryError,
    InvalidRequestError,
    OmniError,
    OutOfKVMemoryError,
    ServerFullError,
    SessionClosedError,
    WorkerFailedError,
    WorkerRestartedError,
)
from vllm_omni.logger import get_logger
from vllm_omni.wording import problem

INTERNAL_ERROR = 500
CLIENT_LEFT = 499
"""Status in the log of an answer that nobody waits for."""
_INTERNAL_TEXT = "an internal error; see the server's log"
_RETRY_AFTER_S = "5"
_STATUSES: tuple[tuple[type[OmniError], int], ...] = (
    (InvalidRequestError, 400),
    (OutOfKVMemoryError, 400),
    (ServerFullError, 503),
    (SessionClosedError, 503),
    (DeviceOutOfMemoryError, 503),
    (WorkerFailedError, 503),
    (WorkerRestartedError, 503),
)


class ErrorDetails(BaseModel):
    """What a client learns about a request that failed."""

    message: str
    type: str = Field(description="invalid_request, server_full, server_error, ...")
    param: str | None = Field(description="name of the field that is wrong, where one is")
    code: int = Field(description="status of the answer")
    request_id: str = Field(description="the same as the header X-Request-Id")


class Error(BaseModel):
    """The one body of every error."""

    model_config = ConfigDict(json_schema_extra={"example": {"error": {
        "message": "num_frames: a rollout has 9 + 12k pixel frames (9, 21, 33, ...), got 80",
        "type": "invalid_request",
        "param": "num_frames",
        "code": 400,
        "request_id": "4939d27c",
    }}})  # fmt: skip

    error: ErrorDetails


ANY_REFUSAL: dict[int | str, dict[str, Any]] = {
    "default": {"model": Error, "description": "any other error, in the same shape"}
}
"""What every route may answer, as its description takes it."""


def refusals(texts: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """What a route answers beside its answer, by status, as its description takes it."""
    return {status: {"model": Error, "description": text} for status, text in texts.items()}


class HttpRefusalError(OmniError):
    """A request that is answered with a certain status.

    Args:
        field: name of the field that is wrong, where one is.
    """

    def __init__(self, status: int, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class ClientLeftError(HttpRefusalError):
    """The client left while it sent its request."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client left before its body was complete")


def status_of(error: BaseException) -> int:
    """HTTP status of a failure; 500 for what nobody foresaw."""
    if isinstance(error, HttpRefusalError):
        return error.status
    known = (status for kind, status in _STATUSES if isinstance(error, kind))
    return next(known, INTERNAL_ERROR)


def message_of(error: BaseException) -> str:
    """What a client may read about a failure; nothing of an unforeseen one."""
    text = str(error) if isinstance(error, OmniError) else _INTERNAL_TEXT
    return f"Video generation failed: {text}" if status_of(error) == INTERNAL_ERROR else text


def error_response(error: BaseException) -> JSONResponse:
    """Answer with the status, the message and the field of a failure."""
    return error_answer(
        status_of(error),
        message_of(error),
        kind=error.code if isinstance(error, OmniError) else None,
        field=error.field if isinstance(error, InvalidRequestError | HttpRefusalError) else None,
    )


def error_body(
    status: int, message: str, *, kind: str | None = None, field: str | None = None
) -> dict[str, object]:
    """The body of an error; ``kind`` follows from the status where it is not given."""
    details = ErrorDetails(
        message=message,
        type=kind or ("server_error" if status >= INTERNAL_ERROR else "invalid_request"),
        param=field,
        code=status,
        request_id=current_request_id(),
    )
    return Error(error=details).model_dump()


def error_answer(
    status: int,
    message: str,
    *,
    kind: str | None = None,
    field: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> JSONResponse:
    """Answer with :func:`error_body`, the id of the request, and any other headers."""
    # The id is set here, too: what the framework catches last is answered outside all middleware.
    sent = {**headers, HEADER: current_request_id()}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        sent["Retry-After"] = _RETRY_AFTER_S
    return JSONResponse(error_body(status, message, kind=kind, field=field), status, headers=sent)


async def answer_http_exception(_: Request, error: Exception) -> JSONResponse:
    """The answer where the framework refuses: no such route, or not by this method."""
    assert isinstance(error, HTTPException), "registered for this class"
    headers = dict(error.headers or {})
    text = error.detail
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and "Allow" in headers:
        text = f"{text}; this route takes {headers['Allow']}"
    return error_answer(error.status_code, text, headers=headers)


async def answer_wrong_parameters(_: Request, error: Exception) -> JSONResponse:
    """The answer to parameters of a URL that break their schema."""
    assert isinstance(error, RequestValidationError), "registered for this class"
    first = problem(error.errors()[0])
    place, *path = first.path
    field = ".".join(path) or place
    return error_answer(422, f"{field}: {first.text}", field=field)


class OneErrorShape:
    """ASGI middleware: plain text of the framework's own refusals becomes the body of all errors.

    Such are a range that a file does not have and a page that CORS does not let in.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and rewrite an answer that is an error in plain text."""
        begun: Message | None = None
        text = bytearray()

        async def rewrite(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and _is_plain_error(message):
                begun = message
            elif begun is None:
                await send(message)
            else:
                text.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _in_shape(begun, text.decode("utf-8", "replace"))(scope, receive, send)

        await self._app(scope, receive, rewrite if scope["type"] == "http" else send)


def _is_plain_error(message: Message) -> bool:
    kind = Headers(raw=message["headers"]).get("content-type", "")
    return message["status"] >= HTTPStatus.BAD_REQUEST and kind.startswith("text/plain")


def _in_shape(begun: Message, text: str) -> JSONResponse:
    status = begun["status"]
    answer = error_answer(status, text or HTTPStatus(status).phrase)
    for name, value in Headers(raw=begun["headers"]).items():
        if not name.startswith("content-") or name == "content-range":
            answer.headers[name] = value
    return answer


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """The answer of any route to what it raises; of a fault the log has the traceback."""
    return error_response(error)


logger = get_logger(__name__)


def count_refusal(metrics: EngineMetrics, request_id: str, error: OmniError) -> None:
    """Count and log a request that was refused before it became a session."""
    reason = "invalid_request" if status_of(error) < INTERNAL_ERROR else "unavailable"
    if isinstance(error, ServerFullError):
        reason = "server_full"
    elif isinstance(error, OutOfKVMemoryError):
        reason = "out_of_memory"
    metrics.refused(reason)
    logger.info("%s refused: %s", request_id, error)


def refusal_of_handshake(state: ServerState) -> OmniError | None:
    """Why a socket is not even opened, if it is not; that is counted and logged.

    An answer with status 503 instead of the handshake lets a proxy try another server. Without
    ``--drain-timeout`` and ``--refuse-when-full`` every socket opens and hears what is wrong.
    """
    config = state.config
    if not (config.refuse_when_full or config.drain_timeout_s):
        return None
    engine = state.client.engine
    try:
        engine.check_admits()
    except OmniError as error:
        if isinstance(error, ServerFullError) and not config.refuse_when_full:
            return None
        count_refusal(engine.metrics, "a handshake", error)
        return error
    return None


@contextmanager
def refusals_counted(metrics: EngineMetrics, request_id: str) -> Iterator[None]:
    """Count whatever leaves the block, once: refusals, clients that left, and what broke.

    A socket that was closed before it asked for anything is not counted.
    """
    try:
        yield
    except ClientGoneError:
        raise
    except ClientLeftError as error:
        metrics.stopped(StopCause.DISCONNECTED)
        logger.info("%s ended: %s", request_id, error)
        raise
    except OmniError as error:
        count_refusal(metrics, request_id, error)
        raise
    except Exception as error:
        # Raised again: whoever answers the client has the traceback written.
        metrics.stopped(StopCause.FAULT)
        fault = type(error).__name__
        logger.warning("%s broke before it was a session: %s", request_id, fault)
        raise
