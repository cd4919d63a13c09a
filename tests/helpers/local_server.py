"""The application on real sockets in a thread of the test process, with fake workers behind it."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.loopback import OnLoopback
from tests.helpers.tiny import tiny_prompt
from vllm_omni.config.resolve import ResolvedDeployment, resolve
from vllm_omni.config.server import ServerConfig
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import create_app
from vllm_omni.entrypoints.server.connections import BACKLOG
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.entrypoints.server.realtime_video import Timers
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.transport import uvicorn_config

CPU_TINY = Path(__file__).parents[2] / "benchmarks/lingbot_world/configs/cpu_tiny.yaml"
MODEL = "lingbot"


@cache
def tiny_deployment() -> ResolvedDeployment:
    """``cpu_tiny.yaml`` with a checkpoint that has no weights."""
    with TemporaryDirectory() as folder:
        checkpoint = write_fake_checkpoint(Path(folder) / "model")
        return resolve(str(checkpoint), deploy_config=CPU_TINY)


@dataclass
class Setup:
    """What a test may change about the server."""

    executors: Sequence[FakeExecutor] = field(default_factory=lambda: [FakeExecutor()])
    timers: Timers = field(default_factory=Timers)
    config: ServerConfig = field(default_factory=lambda: ServerConfig((MODEL,)))
    images: ImageSource = field(default_factory=ImageSource)
    max_queued: int = 4
    start_engine: bool = True


class NoImages(ImageSource):
    """A picture that never comes."""

    async def load(self, _url: str) -> str | bytes:
        await asyncio.Event().wait()
        return b""


@dataclass(frozen=True)
class LateImages(ImageSource):
    """Pictures that come when a test lets them."""

    come: threading.Event = field(default_factory=threading.Event)

    async def load(self, url: str) -> str | bytes:
        assert await asyncio.to_thread(self.come.wait, 20)
        return await super().load(url)


class LocalServer(OnLoopback):
    """A running application.

    Attributes:
        executors: workers of each generation; the first one runs now.
    """

    def __init__(self, setup: Setup) -> None:
        self.executors = list(setup.executors)
        generations = iter(self.executors)
        supervisor = WorkerSupervisor(lambda: next(generations), warm_up=None, sleep=lambda _: None)
        self.engine = Engine(
            lambda _: supervisor, EngineMetrics(MODEL), max_queued=setup.max_queued
        )
        client = EngineClient(tiny_deployment(), self.engine, tiny_prompt)
        self.state = ServerState(client, setup.config, images=setup.images)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        app = create_app(self.state, setup.timers)
        self._server = uvicorn.Server(uvicorn_config(app, setup.config))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="server"
        )

    @property
    def executor(self) -> FakeExecutor:
        """The first generation of workers."""
        return self.executors[0]

    @property
    def connections(self) -> int:
        """Open connections of any kind."""
        return len(self._server.server_state.connections)

    def num_tasks(self) -> int:
        """Tasks on the server's event loop."""
        counted: queue.SimpleQueue[int] = queue.SimpleQueue()
        loop = self._server.servers[0].get_loop()
        loop.call_soon_threadsafe(lambda: counted.put(len(asyncio.all_tasks(loop))))
        return counted.get(timeout=10)

    def start(self, *, engine: bool) -> None:
        """Serve; the engine first."""
        if engine:
            self.engine.start()
        self._thread.start()
        wait_until(lambda: self._server.started)
        self._listener.listen(BACKLOG)

    def stop(self) -> None:
        """End everything."""
        self._server.should_exit = True
        for executor in self.executors:
            executor.gate.set()
        self.engine.close()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"
        self._listener.close()

    def idle(self) -> bool:
        """Whether nothing of any session is left."""
        return not (self.engine.num_sessions or self.executor.open_ids or self.state.sockets)


@contextmanager
def local_server(*executors: FakeExecutor, **changes: object) -> Iterator[LocalServer]:
    """Serve until the block ends; see :class:`Setup` for what can be changed."""
    setup = Setup(**changes) if not executors else Setup(executors=executors, **changes)
    server = LocalServer(setup)
    server.start(engine=setup.start_engine)
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], *, patience_s: float = 20.0) -> None:
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
