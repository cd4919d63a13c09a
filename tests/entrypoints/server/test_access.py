"""Who may talk to the server: API keys and the origin of pages, over HTTP and WebSocket."""

import base64
import socket

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from tests.helpers.local_server import MODEL, LocalServer, local_server
from tests.helpers.socket_client import socket_client, start_message
from vllm_omni.config.server import ServerConfig

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PAGE = "https://page.example"
KEYED = ServerConfig((MODEL,), api_keys=("first-key", "second-key"))


@pytest.fixture(scope="module")
def open_server():
    with local_server() as running:
        yield running


@pytest.fixture(scope="module")
def keyed_server():
    with local_server(config=KEYED) as running:
        yield running


async def status_of_socket(url: str, subprotocols: list[str] | None = None, **headers: str) -> int:
    """101 for an accepted socket, else the status of the refusal."""
    try:
        async with socket_client(
            url, additional_headers=headers, subprotocols=subprotocols
        ) as client:
            await client.say(start_message())
            await client.expect("video.start")
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


class TestKeys:
    @pytest.mark.parametrize("key", ["first-key", "second-key"])
    async def test_a_key_lets_in(self, keyed_server, key):
        bearer = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{keyed_server.address}/v1/models", headers=bearer).status_code == 200
        assert await status_of_socket(keyed_server.url, **bearer) == 101

    @pytest.mark.parametrize(
        "headers",
        [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer first-key-and-more"},
         {"Authorization": "Bearer"}, {"Authorization": "Bearer first-ke\xff"},
         {"X-Api-Key": "first-key"}],
        ids=str,
    )  # fmt: skip
    async def test_nothing_else_does(self, keyed_server, headers):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = httpx.get(f"{keyed_server.address}/v1/models", headers=raw)
        assert answer.status_code == 401
        assert "first-key" not in answer.text
        if "\xff" not in str(headers):
            assert await status_of_socket(keyed_server.url, **headers) == 403
        assert keyed_server.engine.num_sessions == 0

    @pytest.mark.parametrize("key", ["first-key", "clé / 鍵", "k" * 200])
    async def test_a_browser_gives_its_key_as_a_subprotocol(self, key):
        encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        with local_server(config=ServerConfig((MODEL,), api_keys=("other", key))) as server:
            offered = ["vllm-omni", f"bearer.{encoded}"]
            async with socket_client(server.url, subprotocols=offered) as client:
                # Chosen, or the browser would give up; and never the key.
                assert client.socket.subprotocol == "vllm-omni"
                await client.say(start_message())
                await client.expect("video.start")

    @pytest.mark.parametrize(
        "offered",
        [["vllm-omni"], ["vllm-omni", "bearer.d3Jvbmc"], ["vllm-omni", "bearer.a"],
         ["vllm-omni", "bearer."], ["vllm-omni", "first-key"], ["vllm-omni", "bearer.first-key"]],
        ids=str,
    )  # fmt: skip
    async def test_no_other_subprotocol_does(self, keyed_server, offered):
        assert await status_of_socket(keyed_server.url, subprotocols=offered) == 403

    async def test_a_subprotocol_is_no_key_of_a_request(self, keyed_server):
        headers = {"Sec-WebSocket-Protocol": "vllm-omni, bearer.Zmlyc3Qta2V5"}
        answer = httpx.get(f"{keyed_server.address}/v1/models", headers=headers)
        assert answer.status_code == 401

    async def test_an_unknown_subprotocol_is_not_chosen(self, open_server):
        async with socket_client(open_server.url, subprotocols=["chat"]) as client:
            assert client.socket.subprotocol is None

    @pytest.mark.parametrize(
        "path",
        ["/v1/models", "/v1/realtime/capabilities", "/v1/videos", "/v1/nothing", "//v1/models/..",
         "/v1"],
    )  # fmt: skip
    def test_every_path_below_v1_needs_one(self, keyed_server, path):
        assert httpx.get(f"{keyed_server.address}{path}").status_code in {401, 404}

    @pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/metrics"])
    def test_operators_need_none(self, keyed_server, path):
        assert httpx.get(f"{keyed_server.address}{path}").status_code == 200

    def test_keys_are_not_shown(self):
        assert "first-key" not in repr(KEYED)


class TestOrigins:
    async def test_no_origin_is_no_browser(self, open_server):
        assert await status_of_socket(open_server.url) == 101

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    async def test_its_own_page(self, open_server, host):
        origin = f"http://{host}:{open_server.port}"
        url = open_server.url.replace("127.0.0.1", host)
        assert await status_of_socket(url, Origin=origin) == 101

    @pytest.mark.parametrize(
        "origin",
        ["http://evil.example", "http://127.0.0.1:1", "null", "http://127.0.0.1.evil.example",
         "file://", ""],
    )  # fmt: skip
    async def test_other_pages_are_refused(self, open_server, origin):
        assert await status_of_socket(open_server.url, Origin=origin) == 403

    @pytest.mark.parametrize(
        ("allowed", "status"),
        [(("https://page.example",), 101), (("*",), 101), (("https://other.example",), 403)],
    )
    async def test_allowed_pages(self, allowed, status):
        config = ServerConfig((MODEL,), allowed_origins=allowed)
        with local_server(config=config) as server:
            assert await status_of_socket(server.url, Origin="https://page.example") == status

    @pytest.fixture(scope="class")
    def shared_server(self):
        config = ServerConfig((MODEL,), api_keys=("key",), allowed_origins=(PAGE,))
        with local_server(config=config) as running:
            yield running

    @pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), ("http://evil.example", 400)])
    def test_a_preflight_carries_no_key(self, shared_server, origin, status):
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type, authorization",
        }
        answer = httpx.options(f"{shared_server.address}/v1/videos", headers=asked)
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (
            PAGE if status == 200 else None
        )
        if status == 200:
            assert "POST" in answer.headers["access-control-allow-methods"]
            allowed = answer.headers["access-control-allow-headers"].lower()
            assert {"content-type", "authorization"} <= set(allowed.split(", "))

    @pytest.mark.parametrize(
        ("origin", "readable"), [(PAGE, PAGE), ("http://evil.example", None), (None, None)]
    )
    @pytest.mark.parametrize(("key", "status"), [("key", 200), ("wrong", 401)])
    def test_allowed_pages_may_read(self, shared_server, origin, readable, key, status):
        headers = {"Authorization": f"Bearer {key}"} | ({"Origin": origin} if origin else {})
        url = f"{shared_server.address}/v1/realtime/capabilities"
        answer = httpx.get(url, headers=headers)
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == readable

    @pytest.mark.parametrize(("origin", "status"), [(PAGE, 415), ("http://evil.example", 403)])
    def test_allowed_pages_may_post(self, shared_server, origin, status):
        """415: past all access checks, at the reading of a body of no known type."""
        headers = {"Origin": origin, "Authorization": "Bearer key"}
        url = f"{shared_server.address}/v1/videos"
        assert httpx.post(url, content=b"x", headers=headers).status_code == status

    @pytest.mark.parametrize(("origin", "status"), [(PAGE, 101), ("http://evil.example", 403)])
    async def test_sockets_are_checked_all_the_same(self, shared_server, origin, status):
        found = await status_of_socket(shared_server.url, Origin=origin, Authorization="Bearer key")
        assert found == status

    def test_nobody_else_may_read_by_default(self, open_server):
        url = f"{open_server.address}/v1/realtime/capabilities"
        answer = httpx.get(url, headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers

    def test_a_page_may_not_post_for_its_visitor(self, open_server):
        form = {"prompt": "x"}
        answer = httpx.post(
            f"{open_server.address}/v1/videos", data=form, headers={"Origin": "http://evil.example"}
        )
        assert answer.status_code == 403
        assert open_server.engine.num_sessions == 0


def upgrade(server: LocalServer, host: str, origin: str) -> int:
    """Status of a handshake that calls the server by a name."""
    asked = (
        f"GET /v1/realtime/video HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(asked.encode())
        return int(client.recv(100).split()[1])


class TestHosts:
    """A page may let its own name lead to this machine (DNS rebinding)."""

    @pytest.fixture(scope="class")
    def loopback_server(self):
        config = ServerConfig((MODEL,), host="127.0.0.1", allowed_hosts=("World.example:8443",))
        with local_server(config=config) as running:
            yield running

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1:81", "localhost", "LocalHost:81", "[::1]:81", "127.9.9.9", "app.localhost",
         "world.example:443", "10.0.0.1", "[fe80::1]:8000"],
    )  # fmt: skip
    def test_names_of_the_loopback_allowed_ones_and_addresses(self, loopback_server, host):
        url = f"{loopback_server.address}/v1/models"
        assert httpx.get(url, headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
         "0x7f.1", "world.example.evil.example"],
    )  # fmt: skip
    def test_no_other_name(self, loopback_server, host):
        assert httpx.get(f"{loopback_server.address}/health", headers={"Host": host}).is_success
        for path in ("/", "/v1/models", "/v1/videos"):
            answer = httpx.get(f"{loopback_server.address}{path}", headers={"Host": host})
            assert answer.status_code == 403
            assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert upgrade(loopback_server, host, f"http://{host}") == 403

    def test_its_page_may_open_a_socket_by_an_allowed_name(self, loopback_server):
        assert upgrade(loopback_server, "world.example", "https://world.example") == 101

    def test_a_page_without_an_origin_is_not_its_own(self, open_server):
        assert upgrade(open_server, "", "null") == 403

    def test_any_name_where_the_server_is_for_others(self, open_server):
        url = f"{open_server.address}/health"
        assert httpx.get(url, headers={"Host": "any.example"}).status_code == 200
