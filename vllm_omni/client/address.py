"""A server as a client finds it: its address, what it says over HTTP, its socket, its answers."""

import asyncio
import base64
import json
import mimetypes
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import cast
from urllib.parse import urlsplit, urlunsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

from vllm_omni.client.errors import CannotConnectError, KeyRefusedError, ProtocolError
from vllm_omni.entrypoints.server.protocol import (
    MAX_START_CHARS,
    SERVER_MESSAGES,
    Capabilities,
    ErrorMessage,
    ServerMessage,
    load_object,
    type_of,
)
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import validate

SOCKET_PATH = "/v1/realtime/video"
CAPABILITIES_PATH = "/v1/realtime/capabilities"
_TIMEOUT_S = 10.0
_BETWEEN_LOOKS_S = 0.5


def socket_url(address: str) -> str:
    """Address of the socket of a server.

    Args:
        address: ``http``, ``https``, ``ws`` or ``wss`` address, or host and port alone; the
            socket's path is appended where it is absent.

    Raises:
        ValueError: another scheme, or no host.
    """
    parts = urlsplit(address if "://" in address else f"http://{address}")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise ValueError(f"an address must be http, https, ws or wss, got {address!r}")
    path = parts.path.rstrip("/").removesuffix(SOCKET_PATH) + SOCKET_PATH
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, parts.query, ""))


def http_url(address: str, path: str) -> str:
    """Address of another route of the same server."""
    parts = urlsplit(socket_url(address))
    root = parts.path.removesuffix(SOCKET_PATH)
    scheme = {"ws": "http", "wss": "https"}[parts.scheme]
    return urlunsplit((scheme, parts.netloc, root + path, parts.query, ""))


def bearer(api_key: str | None) -> dict[str, str]:
    """Headers that carry a key, none without one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def image_url(image: str | Path | bytes) -> str:
    """A picture as a server takes it: a URL as it is, a file or its bytes inlined."""
    if isinstance(image, bytes):
        return _data_url("image/png", image)  # the server looks at the bytes, not at the name
    if isinstance(image, str) and is_url(image):
        return image
    path = Path(image).expanduser()
    return _data_url(mimetypes.guess_type(path.name)[0] or "image/png", path.read_bytes())


def is_url(image: str) -> bool:
    """Whether a picture's name is one that a server reads, not the path of a file."""
    return image.startswith(("http://", "https://", "data:"))


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def ask_capabilities(address: str, api_key: str | None) -> Capabilities:
    """What a server can do: its size, its chunks, its rate.

    Raises:
        CannotConnectError: no server answers, or it wants a key.
        ProtocolError: it answers something else.
    """
    url = http_url(address, CAPABILITIES_PATH)
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            answer = await client.get(url, headers=bearer(api_key))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise CannotConnectError(f"cannot connect to {url}: {error}") from error
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise KeyRefusedError(f"{url} needs a valid API key", status=answer.status_code)
    if answer.status_code != HTTPStatus.OK:
        raise CannotConnectError(
            f"{url} answers {answer.status_code}: {answer.text[:100]}", status=answer.status_code
        )
    try:
        told = load_object(answer.text, limit=MAX_START_CHARS)
        return validate(Capabilities, told, written=True)
    except InvalidRequestError as error:
        raise ProtocolError(f"{url} does not describe a server: {answer.text[:100]}") from error


async def wait_until_ready(address: str, patience_s: float | int) -> None:
    """Wait until a server can make worlds: it may be loading, or starting again.

    Raises:
        CannotConnectError: it could not within ``patience_s`` seconds.
    """
    url = http_url(address, "/health")
    deadline = monotonic() + patience_s
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        while (lack := await _lack(client, url)) is not None:
            if monotonic() >= deadline:
                raise CannotConnectError(f"{url} is not ready after {patience_s} s; {lack}")
            await asyncio.sleep(_BETWEEN_LOOKS_S)


async def _lack(client: httpx.AsyncClient, url: str) -> str | None:
    """What a server lacks to be ready, ``None`` if nothing."""
    try:
        answer = await client.get(url)
    except httpx.TransportError as error:
        return f"no answer: {error}"
    ready = answer.status_code == HTTPStatus.OK
    return None if ready else f"it answers {answer.status_code}: {answer.text[:100]}"


async def connect_to(address: str, api_key: str | None) -> ClientConnection:
    """A connection to the server at an address.

    Raises:
        CannotConnectError: no server, or it denies the connection.
        KeyRefusedError: it wants a key, or another one.
    """
    url = socket_url(address)
    try:
        # Answers to the socket's own pings would wait behind a full receive buffer.
        return await connect(
            url, max_size=None, ping_interval=None, additional_headers=bearer(api_key)
        )
    except InvalidStatus as error:
        raise _denied(url, error) from error
    except (OSError, InvalidHandshake, InvalidURI) as error:
        raise CannotConnectError(f"cannot connect to {url}: {error}") from error


def _denied(url: str, error: InvalidStatus) -> CannotConnectError:
    """What a server that opens no socket says, in its own words where it has some."""
    status = error.response.status_code
    said = (error.response.body or b"").decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(said)["error"]["message"]
    text = f"{url} denies the connection with status {status}" + (f": {said}" if said else "")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return KeyRefusedError(f"{text}; it may want an API key", status=status)
    return CannotConnectError(text, status=status)


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
