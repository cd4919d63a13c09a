"""Opening the socket of a server."""

import json
from contextlib import suppress
from http import HTTPStatus

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

from vllm_omni.client.address import bearer, socket_url
from vllm_omni.client.errors import CannotConnectError, KeyRefusedError


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
