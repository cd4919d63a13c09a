"""The id of each request: its client's ``X-Request-Id``, or one that is drawn here.

Every answer gives it back in that header, every error in its body, and every log line about the
request names it. Tasks of a request find it in :data:`vllm_omni.logger.request_id`.
"""

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.server.tracing import Traces
from vllm_omni.logger import get_logger, request_id

logger = get_logger(__name__)

HEADER = "X-Request-Id"
_is_chosen: ContextVar[bool] = ContextVar("request_id_is_chosen", default=False)
"""Whether the client of the current request gave it its id."""
_FIT = re.compile(r"[!-~]{1,128}")
_BEGINS_ANSWER = {"http.response.start", "websocket.accept", "websocket.http.response.start"}


class RequestIds:
    """ASGI middleware in front of all others, so that their refusals carry the id, too."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the id of a request and its trace, and put the id on the answer."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._traces.join(headers)
        given = headers.get(HEADER, "")
        chosen = _FIT.fullmatch(given) is not None
        _is_chosen.set(chosen)
        request_id.set(given if chosen else uuid.uuid4().hex)

        async def send_with_id(message: Message) -> None:
            if message["type"] in _BEGINS_ANSWER:
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[HEADER] = current_request_id()
            await send(message)

        await self._app(scope, receive, send_with_id)


def current_request_id() -> str:
    """The id that the client of the current request is told; drawn where there is none yet."""
    found = request_id.get()
    if found is None:
        found = uuid.uuid4().hex
        request_id.set(found)
    return found


def name_result(prefix: str) -> str:
    """Name what outlives the current request; no two requests share such a name.

    It becomes the id of a request whose client chose none.
    """
    name = f"{prefix}{uuid.uuid4().hex}"
    if _is_chosen.get():
        logger.info("%s is the result of request %s", name, request_id.get())
    else:
        request_id.set(name)
    return name


def name_request(prefix: str) -> str:
    """Name the current request for the log and the engine; a second call gives the same name.

    Returns:
        The prefix and the id that the client chose, or else a new name, which becomes the id.
    """
    found = current_request_id()
    if found.startswith(prefix):
        return found
    named = f"{prefix}{found}"
    if not _is_chosen.get():
        request_id.set(named)
    return named
