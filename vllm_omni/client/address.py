"""Addresses of a server and what it says about itself over HTTP."""

import asyncio
import base64
import mimetypes
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit, urlunsplit

import httpx

from vllm_omni.client.errors import CannotConnectError, KeyRefusedError, ProtocolError
from vllm_omni.entrypoints.server.protocol import MAX_START_CHARS, Capabilities, load_object
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
