"""Errors as HTTP answers: one body, one table of statuses."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

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
_UNAVAILABLE = 503


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
    """``{"error": {"message", "type", "param", "code"}}`` with the status of the failure."""
    status = status_of(error)
    return _answer(
        status,
        message_of(error),
        kind=error.code if isinstance(error, OmniError) else None,
        field=error.field if isinstance(error, InvalidRequestError | HttpRefusalError) else None,
    )


def error_body(
    status: int, message: str, *, kind: str | None = None, field: str | None = None
) -> dict[str, object]:
    """The one body of every error; ``kind`` follows from the status where it is not given."""
    return {
        "error": {
            "message": message,
            "type": kind or _kind(status),
            "param": field,
            "code": status,
        }
    }


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """The answer of any route to what it raises; of a fault the log has the traceback."""
    return error_response(error)


def _answer(
    status: int, message: str, *, kind: str | None = None, field: str | None = None
) -> JSONResponse:
    retry = {"Retry-After": _RETRY_AFTER_S} if status == _UNAVAILABLE else None
    return JSONResponse(error_body(status, message, kind=kind, field=field), status, headers=retry)


def _kind(status: int) -> str:
    return "server_error" if status >= INTERNAL_ERROR else "invalid_request"
