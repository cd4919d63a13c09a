"""Start of the process around the application."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, tiny_deployment, wait_until
from tests.helpers.tiny import tiny_prompt
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server import app as app_module
from vllm_omni.entrypoints.server.app import EngineServer, engine_server, serve_engine
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.transport import uvicorn_config

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]


CERTIFICATE = str(Path(__file__).parents[2] / "helpers/fixtures/localhost.pem")


def client_of(workers: FakeExecutor) -> EngineClient:
    supervisor = WorkerSupervisor(lambda: workers, warm_up=None)
    engine = Engine(lambda _: supervisor, EngineMetrics(MODEL), max_queued=4)
    return EngineClient(tiny_deployment(), engine, tiny_prompt)


@contextmanager
def serving(app: ASGIApp, **settings: object) -> Iterator[tuple[EngineServer, int]]:
    """A server with an application of the test's, and its port."""
    config = ServerConfig((MODEL,), **settings)
    state = ServerState(client_of(FakeExecutor()), config)
    server = EngineServer(uvicorn_config(app, config), state)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: state.client.engine.unready_reason is None)
        try:
            yield server, port
        finally:
            server.should_exit = True
            thread.join()


class Hanging(FakeExecutor):
    """Workers that load until they are ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def start(self) -> GroupCapacity:
        assert self.ended.wait(60), "nobody ended the workers"
        return super().start()

    def shutdown(self) -> None:
        super().shutdown()
        self.ended.set()


def test_an_engine_that_does_not_start_in_time_ends_the_server(caplog: pytest.LogCaptureFixture):
    workers = Hanging()
    client = client_of(workers)
    limited = replace(client.deployment.config, init_timeout_s=0.3)
    client = replace(client, deployment=replace(client.deployment, config=limited))
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status = serve_engine(client, server=ServerConfig((MODEL,)), listener=listener)
    assert status == 1
    assert "init_timeout" in caplog.text
    assert workers.shut_down == 1
    assert time.monotonic() - began_s < 30


def test_a_server_that_ends_waits_until_an_answer_is_read():
    """Handed over in one piece, as a video is: the handler is through long before its client."""
    body = bytes(64 * 1024 * 1024)  # more than a system buffers for a socket
    app = Starlette(routes=[Route("/", lambda _: Response(body))])
    with serving(app, shutdown_timeout_s=600.0) as (server, port), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = len(client.recv(32768))
        loop = server.servers[0].get_loop()
        loop.call_soon_threadsafe(server.handle_exit, signal.SIGTERM, None)
        wait_until(lambda: server._state.client.engine.draining)
        time.sleep(0.3)  # Some looks at what is left.
        assert not server.should_exit
        while part := client.recv(1 << 20):
            heard += len(part)
        wait_until(lambda: server.should_exit)
    assert heard > len(body)


def test_a_handshake_of_tls_has_a_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "REQUEST_TIMEOUT_S", 0.3)
    app = Starlette(routes=[Route("/", lambda _: Response("hello"))])
    with serving(app, ssl_certfile=CERTIFICATE) as (_, port):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
            assert silent.recv(1) == b""  # The event loop's own limit is a minute.
        assert httpx.get(f"https://localhost:{port}/", verify=CERTIFICATE).text == "hello"


@pytest.mark.parametrize(("host", "status"), [("127.1", 403), ("LOCALHOST", 403), ("0", 200)])
def test_whether_the_loopback_alone_is_served_says_the_address(host, status):
    """Names that a page could let lead here (DNS rebinding) are refused there."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        config = ServerConfig((MODEL,), host=host)
        server = engine_server(client_of(FakeExecutor()), config, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}/v1/models"
            assert httpx.get(url, headers={"Host": "evil.example"}).status_code == status
        finally:
            server.should_exit = True
            thread.join()
