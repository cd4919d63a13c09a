"""Errors as HTTP answers: one body, one table of statuses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

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
    body = {
        "message": message_of(error),
        "type": (error.code if isinstance(error, OmniError) else None) or _kind(status),
        "param": error.field if isinstance(error, InvalidRequestError | HttpRefusalError) else None,
        "code": status,
    }
    retry = {"Retry-After": _RETRY_AFTER_S} if status == _UNAVAILABLE else None
    return JSONResponse({"error": body}, status, headers=retry)


def _kind(status: int) -> str:
    return "server_error" if status >= INTERNAL_ERROR else "invalid_request"


class AnsweringRoute(APIRoute):
    """A route whose handler may raise any :class:`OmniError`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with errors turned into answers."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except OmniError as error:
                return error_response(error)

        return answer
