"""Start of the process around the application."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, tiny_deployment
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import serve_engine

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]


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
    deployment = tiny_deployment()
    limited = replace(deployment, config=replace(deployment.config, init_timeout_s=0.3))
    supervisor = WorkerSupervisor(lambda: workers, warm_up=None)
    client = EngineClient(limited, Engine(supervisor, EngineMetrics(MODEL), max_queued=4))
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status = serve_engine(client, server=ServerConfig((MODEL,)), listener=listener)
    assert status == 1
    assert "init_timeout" in caplog.text
    assert workers.shut_down == 1
    assert time.monotonic() - began_s < 30
