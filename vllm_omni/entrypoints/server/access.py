"""Who may talk to the server: API keys and the origin of browser sockets."""

import base64
import hmac
import ipaddress
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server.http_errors import error_answer
from vllm_omni.logger import get_logger
from vllm_omni.wording import shown

logger = get_logger(__name__)

SUBPROTOCOL = "vllm-omni"
"""What a socket's client offers beside its key, so that the server need not say a key back."""
_KEY_PREFIX = "bearer."
_PROBES = {"/health", "/ping"}
"""Asked by watchers under any name; they tell nothing of worth to a page."""
_SCHEME = "bearer"
_HEADERS = {
    400: {"Connection": "close"},  # Where its body ends is anybody's guess.
    401: {"WWW-Authenticate": _SCHEME.title()},
}
_READING_METHODS = {"GET", "HEAD", "OPTIONS"}


class AccessControl:
    """ASGI middleware in front of every route.

    Paths under ``/v1`` need a key where keys are configured, those under ``/admin`` one of the
    operator's: in the ``Authorization`` header, or,
    since a browser cannot send that one with a WebSocket, as the subprotocol ``bearer.`` and the
    base64url of the key. A WebSocket that a browser opens and a request that changes something
    name the page's origin, which must be this server's own or an allowed one: a browser sends
    both for any page, whether or not it lets it read the answer.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        headers = Headers(scope=scope)
        refusal = None
        path = _route_path(scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            refusal = (400, "has both Content-Length and Transfer-Encoding")
        elif path not in _PROBES and not self._host_allowed(headers):
            named = shown(_host_name(headers["host"])).strip('"')
            refusal = _told(
                f"this server is not known as {named}; start it with --allowed-hosts {named}"
            )
        elif (keys := self._keys_of(path)) and not _has_key(keys, scope, headers):
            refusal = (401, "a valid API key is required: Authorization: Bearer KEY")
        elif _changes_something(scope) and not self._origin_allowed(headers):
            named = shown(headers["origin"]).strip('"')
            refusal = _told(
                f"this page's origin {named} is not allowed; start the server with "
                f"--allowed-origins {named}"
            )
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            socket = WebSocket(scope, receive, send)
            await socket.send_denial_response(error_answer(403, refusal[1]))
        else:
            status, message = refusal
            headers = _HEADERS.get(status, {})
            await error_answer(status, message, headers=headers)(scope, receive, send)

    def _keys_of(self, path: str) -> tuple[str, ...]:
        """The keys of which a request for a path needs one; empty if it needs none."""
        if path.startswith("/admin"):
            return self._config.admin_keys
        return self._config.api_keys if path.startswith("/v1") else ()

    def _origin_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._config.allowed_origins:
            return True
        if origin in self._config.allowed_origins:
            return True
        _, separator, host = origin.partition("://")
        return bool(separator and host) and host == headers.get("host")

    def _host_allowed(self, headers: Headers) -> bool:
        """Tell whether the name that a client called is one of this server.

        Else a page could let its own name lead here, and be its own origin.
        """
        allowed = self._config.allowed_hosts
        if "*" in allowed or not (allowed or is_loopback(self._config.host or "")):
            return True
        known = {_host_name(name) for name in allowed}
        names = [_host_name(value) for value in headers.getlist("host") if value]
        # No page can let an address lead elsewhere, as it can a name.
        return all(name in known or is_loopback(name) or _address(name) for name in names)


def _has_key(keys: tuple[str, ...], scope: Scope, headers: Headers) -> bool:
    given = _keys_of_headers(headers.getlist("authorization"))
    if scope["type"] == "websocket":
        given += _keys_of_subprotocols(scope["subprotocols"])
    return any(
        hmac.compare_digest(one, key) for one in given for text in keys for key in _spellings(text)
    )


def _in_origin_form(scope: Scope) -> Scope:
    """The request without the server's name in its target, as clients of a proxy write it.

    That name is the one that counts, whatever ``Host`` says (RFC 9112, section 3.2.2).
    """
    root = scope.get("root_path", "")
    scheme, separator, rest = scope["path"].removeprefix(root).partition("://")
    if not separator or scheme.lower() not in {"http", "https"}:
        return scope
    host, _, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers.append((b"host", host.encode("latin-1", "replace")))
    path = f"{root}/{path}"
    return {**scope, "path": path, "raw_path": quote(path).encode(), "headers": headers}


def _route_path(scope: Scope) -> str:
    """The path as routes are found by it: without that of a proxy that does not strip its own."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _told(text: str) -> tuple[int, str]:
    """A refusal whose words are for whoever reads the answer, and for the log of this server."""
    logger.warning("%s", text)
    return 403, text


def chosen_subprotocol(offered: list[str]) -> str | None:
    """What to answer to a client's subprotocols; a browser closes a socket that chose none."""
    return SUBPROTOCOL if SUBPROTOCOL in offered else None


def _host_name(value: str) -> str:
    """The name in a Host header, without its port and the brackets of an IPv6 address."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a client called, ``None`` if it called a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _keys_of_headers(values: list[str]) -> list[bytes]:
    """The bytes behind ``Bearer``, whatever its case; none of several headers of the name."""
    if len(values) != 1:
        return []
    scheme, _, key = values[0].partition(" ")
    return [key.strip(" ").encode("latin-1")] if scheme.lower() == _SCHEME else []


def _spellings(key: str) -> list[bytes]:
    """How clients write a key in a header: as UTF-8, or in the older encoding where that can."""
    latin = key.encode("latin-1", "ignore")
    return [key.encode(), latin] if latin.decode("latin-1") == key else [key.encode()]


def _keys_of_subprotocols(offered: list[str]) -> list[bytes]:
    encoded = [name.removeprefix(_KEY_PREFIX) for name in offered if name.startswith(_KEY_PREFIX)]
    keys = []
    for text in encoded:
        try:
            keys.append(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except ValueError:
            continue
    return keys


def _changes_something(scope: Scope) -> bool:
    return scope["type"] == "websocket" or scope["method"] not in _READING_METHODS
