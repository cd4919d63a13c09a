"""Clients that open connections and say nothing cost a place that anybody else gets at once."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.helpers.local_server import LocalServer, local_server, wait_until
from tests.helpers.server import RealServer, real_server
from tests.helpers.socket_client import socket_client, start_message
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server import transport, wire_protocols
from vllm_omni.entrypoints.server.connections import Debt, OpenConnections
from vllm_omni.entrypoints.server.transport import uvicorn_config

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

LIMIT = 8
UPGRADE = (
    b"GET /v1/realtime/video HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HALF_A_FRAME = b"\x81\xfe\x10\x00\x00\x00\x00\x00{"
"""The head of a text frame of 4096 bytes, and its first byte."""
SILENCES = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "half a second head": b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\nGET /ping HTT",
    "idle after an answer": b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a body": b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{",
    "a body in no chunk": b"POST /v1/videos/sync HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a body that nobody reads": b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "a socket without start": UPGRADE,
    "a socket with half a frame": UPGRADE + HALF_A_FRAME,
    "a socket with pings alone": UPGRADE + b"\x89\x80\x00\x00\x00\x00",
}


class FakeConnection(asyncio.WriteTransport):
    """A connection without a wire, which notes that it was cut off."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class TestWhoMakesRoom:
    def filled(self, *debts: Debt) -> tuple[OpenConnections, list[FakeConnection]]:
        table, members = OpenConnections(len(debts)), [FakeConnection() for _ in debts]
        for member, debt in zip(members, debts, strict=True):
            assert table.opened(member, debt)
        return table, members

    def cut_off(self, table: OpenConnections, members: list[FakeConnection]) -> list[int]:
        assert table.opened(FakeConnection(), Debt.REQUEST)
        return [place for place, one in enumerate(members) if one.aborted]

    def test_nobody_while_there_is_room(self):
        table = OpenConnections(2)
        first = FakeConnection()
        assert table.opened(first, Debt.REQUEST)
        assert table.opened(FakeConnection(), Debt.REQUEST)
        assert not first.aborted
        assert len(table) == 2

    def test_whoever_owes_longest(self):
        assert self.cut_off(*self.filled(Debt.REQUEST, Debt.REQUEST, Debt.START)) == [0]

    def test_nobody_who_owes_nothing(self):
        assert self.cut_off(*self.filled(Debt.NOTHING, Debt.START, Debt.REQUEST)) == [1]

    def test_a_new_debt_begins_its_time(self):
        table, members = self.filled(Debt.REQUEST, Debt.REQUEST)
        table.owes(members[0], Debt.BODY)
        assert self.cut_off(table, members) == [1]

    def test_the_same_debt_does_not(self):
        table, members = self.filled(Debt.REQUEST, Debt.REQUEST)
        table.owes(members[0], Debt.REQUEST)
        assert self.cut_off(table, members) == [0]

    def test_the_new_one_finds_no_place_where_nobody_owes(self):
        table, members = self.filled(Debt.NOTHING, Debt.NOTHING)
        assert not table.opened(FakeConnection(), Debt.REQUEST)
        assert not any(one.aborted for one in members)
        table.closed(members[1])
        assert table.opened(FakeConnection(), Debt.REQUEST)

    def test_who_has_gone_owes_nothing_more(self):
        table, members = self.filled(Debt.REQUEST, Debt.REQUEST)
        table.closed(members[0])
        table.owes(members[0], Debt.BODY)
        assert len(table) == 1
        assert self.cut_off(table, members) == []


@contextmanager
def talkers(port: int, said: bytes, how_many: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = []
        for _ in range(how_many):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            one.sendall(said)
            opened.append(one)
        yield opened


def ended(one: socket.socket, patience_s: float = 10.0) -> bytes:
    """Everything that came until the server ended the connection."""
    one.settimeout(patience_s)
    heard = b""
    try:
        while part := one.recv(65536):
            heard += part
    except ConnectionResetError:
        pass
    return heard


@pytest.fixture
def small_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setattr(transport, "connection_limit", lambda: LIMIT)
    with local_server() as running:
        yield running


class TestSilence:
    @pytest.mark.parametrize("said", SILENCES.values(), ids=SILENCES)
    def test_health_answers_beside_many_silent_clients(self, small_server, said):
        with talkers(small_server.port, said, 3 * LIMIT):
            answers = [httpx.get(f"{small_server.address}/health", timeout=5) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert small_server.connections <= LIMIT + 2

    async def test_a_world_goes_on_beside_many_silent_clients(self, small_server):
        async with socket_client(small_server.url) as client:
            await client.say(start_message())
            await client.expect("video.start")
            with talkers(small_server.port, UPGRADE, 3 * LIMIT):
                assert (await client.rest())["stopped"] is False

    async def test_all_places_taken_by_worlds_is_told(self, monkeypatch):
        monkeypatch.setattr(transport, "connection_limit", lambda: 1)
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(unbounded=True, num_frames=None))
                await client.expect("video.start")
                answer = httpx.get(f"{server.address}/health", timeout=5)
                assert answer.status_code == 503
                assert "too many connections" in answer.json()["error"]["message"]


@pytest.mark.timing
class TestTimeLimits:
    @pytest.fixture
    def hasty_server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
        monkeypatch.setattr(wire_protocols, "REQUEST_TIMEOUT_S", 0.5)
        monkeypatch.setattr(transport, "_KEEP_ALIVE_S", 0.5)
        with local_server() as running:
            yield running

    @pytest.mark.parametrize("name", ["nothing", "half a head"])
    def test_no_request_ends_the_connection(self, hasty_server, name):
        with talkers(hasty_server.port, SILENCES[name], 2) as clients:
            assert [ended(client) for client in clients] == [b"", b""]
        wait_until(lambda: hasty_server.connections == 0)

    def test_a_head_that_drips_ends_it_too(self, hasty_server):
        with talkers(hasty_server.port, SILENCES["half a head"], 1) as (client,):
            wait_until(lambda: not _takes(client, b"a"), patience_s=5)

    @pytest.mark.parametrize(
        "name", ["half a second head", "idle after an answer", "a body that nobody reads"]
    )
    def test_no_second_request_ends_it_after_the_idle_time(self, hasty_server, name):
        with talkers(hasty_server.port, SILENCES[name], 1) as (client,):
            assert ended(client, 15).startswith(b"HTTP/1.1 200 OK")

    def test_a_request_in_time_is_answered_however_long_that_takes(self, hasty_server):
        gate = hasty_server.executor.gate
        gate.clear()
        form = {name: value for name, value in start_message().items() if name != "type"}
        with talkers(hasty_server.port, _post("/v1/videos/sync", form), 1) as (client,):
            wait_until(lambda: hasty_server.engine.num_sessions == 1)
            time.sleep(1.0)
            gate.set()
            client.settimeout(20)
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """One frame of a client, masked with zeros."""
    long = len(payload) > 125
    length = b"\xfe" + len(payload).to_bytes(2, "big") if long else bytes([0x80 | len(payload)])
    return bytes([0x80 * fin | opcode]) + length + bytes(4) + payload


CONT, TEXT, PING, PONG = 0, 1, 9, 10
LEFT_OPEN = frame(TEXT, b"{", fin=False)


class TestFloods:
    """Frames of nothing cost their sender six bytes and the server a thousand times their work."""

    @pytest.fixture(scope="class")
    def server(self) -> Iterator[LocalServer]:
        with local_server() as running:
            yield running

    def verdict(self, port: int, data: bytes) -> bytes:
        """What a socket hears that sends bytes, as far as the server's words about them."""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(UPGRADE)
            assert client.recv(4096).startswith(b"HTTP/1.1 101 ")
            with suppress(ConnectionError):
                client.sendall(data)
            heard = b""
            while b"too many" not in heard and b"not valid JSON" not in heard:
                part = client.recv(65536)
                assert part, heard[-200:]
                heard += part
            return heard

    @pytest.mark.parametrize(
        "flood",
        [frame(PING) * 1_100, frame(PONG) * 1_100, LEFT_OPEN + frame(CONT, fin=False) * 1_100,
         LEFT_OPEN + frame(CONT, b"x" * 90, fin=False) * 1_100],
        ids=["pings", "pongs", "empty fragments", "small fragments"],
    )  # fmt: skip
    def test_one_ends_its_socket_with_words(self, server, flood):
        assert b"too many pings, pongs or small fragments" in self.verdict(server.port, flood)

    def test_one_that_goes_on_is_cut_off_and_nobody_else(self, server):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(UPGRADE)
            # What the server says is lost if it is reset with bytes that nobody has read.
            with suppress(ConnectionError):
                client.sendall(frame(PING) * 400_000)
                while client.recv(65536):
                    pass
        assert httpx.get(f"{server.address}/health", trust_env=False).status_code == 200

    @pytest.mark.parametrize(
        "frames",
        [frame(PING) * 900, LEFT_OPEN + frame(CONT, fin=False) * 900 + frame(CONT, b"{"),
         LEFT_OPEN + frame(CONT, b" " * 1100, fin=False) * 2_000 + frame(CONT, b"{")],
        ids=["pings", "fragments", "fragments of a kilobyte"],
    )  # fmt: skip
    def test_what_no_flood_is_is_heard(self, server, frames):
        assert b"not valid JSON" in self.verdict(server.port, frames + frame(TEXT, b"{"))


@pytest.mark.timing
class TestSlowReaders:
    """An answer of many megabytes that is handed over in one piece, as a video is."""

    BODY = bytes(8 * 1024 * 1024)

    @pytest.fixture
    def port(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
        monkeypatch.setattr(wire_protocols, "REQUEST_TIMEOUT_S", 0.2)
        monkeypatch.setattr(transport, "_KEEP_ALIVE_S", 0.2)
        monkeypatch.setattr(wire_protocols, "_UNREAD_TIMEOUT_S", 1.0)
        monkeypatch.setattr(wire_protocols, "_LOOK_S", 0.05)
        app = Starlette(routes=[Route("/", lambda _: Response(self.BODY))])
        server = uvicorn.Server(uvicorn_config(app, ServerConfig(("model",))))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            serving.start()
            yield listener.getsockname()[1]
            server.should_exit = True
            serving.join()

    @contextmanager
    def asked(self, port: int) -> Iterator[socket.socket]:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            yield client

    def test_one_that_goes_on_reading_gets_everything(self, port):
        heard = 0
        with self.asked(port) as client:
            while part := client.recv(32768):
                heard += len(part)
                time.sleep(0.02)
        assert heard > len(self.BODY)

    def test_one_that_stops_reading_is_cut_off(self, port):
        with self.asked(port) as client:
            client.recv(32768)
            time.sleep(2.5)
            assert len(ended(client)) < len(self.BODY) // 2


def _takes(client: socket.socket, said: bytes) -> bool:
    try:
        client.sendall(said)
    except OSError:
        return False
    return True


def _post(path: str, body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def test_what_is_no_http_gets_the_body_of_every_error(small_server):
    with talkers(small_server.port, b"\x16\x03\x01 hello\r\n\r\n", 1) as (client,):
        head, _, body = ended(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["code"] == 400


@pytest.mark.timing
def test_few_descriptors_are_enough():
    """What a shell with ``ulimit -n 128`` would run; hard limit included."""
    limited = (
        "-c",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
        "from vllm_omni.entrypoints.cli.main import main; raise SystemExit(main())",
        "serve",
    )
    with real_server(program=limited) as server:
        for said in (b"", UPGRADE, SILENCES["half a body"]):
            with talkers(server.port, said, 200):
                assert _answers(server.health)
        assert server.health() == 200
        assert "Traceback" not in server.log
        assert "Too many open files" not in server.log
        assert _descriptors(server) < 64


def _answers(ask: Callable[[], int]) -> bool:
    return any(ask() == 200 for _ in range(3))


def _descriptors(server: RealServer) -> int:
    wait_until(lambda: server.api.num_fds() < 64)
    return server.api.num_fds()
