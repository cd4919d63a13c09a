"""Pictures that a client names by URL: ``data:`` URLs, and http(s) without reaching inwards."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import httpx

from vllm_omni import envs
from vllm_omni.errors import InvalidRequestError

_FIELD = "image_reference.image_url"
_MAX_REDIRECTS = 5
_MAX_BYTES = 64 * 2**20
_TRANSLATED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("2002::/16"))
"""IPv6 addresses that lead to the IPv4 address inside them, a private one perhaps."""
_NAMES = ThreadPoolExecutor(32, thread_name_prefix="names")
"""Threads of their own: clients choose names, and so for how long a look-up waits."""
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Fetches the pictures that clients name by URL.

    Attributes:
        allowed_hosts: the only host names that may be fetched from, whatever their addresses;
            empty allows every host whose addresses are public.
        timeout_s: for the whole fetch.
    """

    allowed_hosts: tuple[str, ...] = ()
    timeout_s: float = 60.0

    def check(self, url: str) -> None:
        """Refuse what can be seen to be no place for a picture before anything is fetched.

        Raises:
            InvalidRequestError: for another scheme, or a host that is not among the allowed.
        """
        scheme, colon, _ = url[:8].lower().partition(":")
        if colon and scheme == "data":
            return
        if scheme not in {"http", "https"}:
            raise InvalidRequestError("must be a data: or http(s) URL", field=_FIELD)
        try:
            self._check_host(httpx.URL(url))
        except httpx.InvalidURL as error:
            raise _unfetchable(error) from None

    async def load(self, url: str) -> str | bytes:
        """The picture behind ``url``, not decoded: a ``data:`` URL itself, or fetched bytes.

        Raises:
            InvalidRequestError: for another scheme, an address that is not public, a redirect
                where none is allowed, a server that fails, or a picture that is too large.
        """
        self.check(url)
        if url[:5].lower() == "data:":
            return url
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._fetch(url)
        except TimeoutError:
            raise InvalidRequestError(
                f"the picture's server did not answer within {self.timeout_s:.0f} s", field=_FIELD
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise _unfetchable(error) from None

    async def _fetch(self, url: str) -> bytes:
        target = httpx.URL(url)
        client = httpx.AsyncClient(
            verify=await asyncio.to_thread(_authorities),
            follow_redirects=False,
            timeout=self.timeout_s,
            # No proxy, credentials or authorities of this process's environment: clients choose
            # where the request goes.
            trust_env=False,
        )
        async with client:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = await self._follow(client, target)
                if isinstance(answer, bytes):
                    return answer
                target = answer
        raise InvalidRequestError(f"more than {_MAX_REDIRECTS} redirects", field=_FIELD)

    async def _follow(self, client: httpx.AsyncClient, target: httpx.URL) -> bytes | httpx.URL:
        """The content of ``target``, or where it redirects to."""
        response = await client.send(await self._pinned_request(client, target), stream=True)
        try:
            return _redirected(target, response) if response.is_redirect else await _read(response)
        finally:
            await response.aclose()

    async def _pinned_request(self, client: httpx.AsyncClient, target: httpx.URL) -> httpx.Request:
        """A request to the very address that was checked, so that a name cannot change its mind."""
        address = await self._checked_address(target)
        return client.build_request(
            "GET",
            target.copy_with(host=address),
            headers={"Host": target.netloc.decode("ascii"), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": target.host},
        )

    def _check_host(self, target: httpx.URL) -> None:
        if target.scheme not in {"http", "https"} or not _host(target):
            raise InvalidRequestError("must be an http(s) URL with a host", field=_FIELD)
        if target.port is not None and not 0 < target.port <= _LAST_PORT:
            raise InvalidRequestError(f"port {target.port} is none", field=_FIELD)
        if self.allowed_hosts and target.host not in self.allowed_hosts:
            raise InvalidRequestError(
                "the picture's host is not among those of --allowed-media-domains", field=_FIELD
            )

    async def _checked_address(self, target: httpx.URL) -> str:
        self._check_host(target)
        port = target.port or (443 if target.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                _NAMES, partial(socket.getaddrinfo, target.host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            raise InvalidRequestError("the picture's host is not known", field=_FIELD) from None
        addresses = [str(entry[4][0]) for entry in found]
        if not self.allowed_hosts:
            for address in addresses:
                if not _is_public(address):
                    raise InvalidRequestError(
                        "the picture's host has an address that is not public "
                        "(--allowed-media-domains)",
                        field=_FIELD,
                    )
        return addresses[0]


def _unfetchable(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture cannot be fetched ({type(error).__name__})", field=_FIELD
    )


def _host(target: httpx.URL) -> str:
    """The host of a URL, blank where its name is none."""
    try:
        return target.host
    except UnicodeError:  # what follows ``xn--`` stands for no characters
        return ""


def _is_public(address: str) -> bool:
    """Whether an address is of one host in the internet, by itself and by what it carries."""
    found = ipaddress.ip_address(address)
    if not found.is_global or found.is_multicast:
        return False
    return not any(found in network for network in _TRANSLATED if network.version == found.version)


@lru_cache(maxsize=1)
def _authorities() -> ssl.SSLContext:
    """Certificates to check servers against; tens of milliseconds, so once and in a thread."""
    return httpx.create_ssl_context(trust_env=False)


def _redirected(target: httpx.URL, response: httpx.Response) -> httpx.URL:
    if not envs.media_url_allow_redirects():
        raise InvalidRequestError(
            "the picture's URL redirects, which is not allowed (VLLM_MEDIA_URL_ALLOW_REDIRECTS)",
            field=_FIELD,
        )
    return target.join(response.headers.get("location", ""))


async def _read(response: httpx.Response) -> bytes:
    if response.status_code != httpx.codes.OK:
        raise InvalidRequestError(
            f"the picture's server answered {response.status_code}", field=_FIELD
        )
    content = bytearray()
    # Raw: a picture gains nothing from a second compression, which could hide any number of bytes.
    async for part in response.aiter_raw():
        content += part
        if len(content) > _MAX_BYTES:
            raise InvalidRequestError(
                f"the picture is larger than {_MAX_BYTES} bytes", field=_FIELD
            )
    return bytes(content)
