"""The whole HTTP application on loopback, with an engine on a fake or a real executor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import uvicorn

from tests.helpers.tiny import tiny_checkpoint_dir, tiny_prompt
from vllm_omni.config.resolve import ResolvedDeployment, resolve
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.executor import Executor
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import create_app
from vllm_omni.entrypoints.server.state import ServerState

ROOT = Path(__file__).resolve().parents[2]
TINY_DEPLOY = ROOT / "benchmarks" / "lingbot_world" / "configs" / "cpu_tiny.yaml"
NAME = "world"


@cache
def tiny_deployment() -> ResolvedDeployment:
    """The tiny checkpoint with the shipped deploy file, in this process."""
    return resolve(
        str(tiny_checkpoint_dir()),
        deploy_config=TINY_DEPLOY,
        overrides={"distributed_executor_backend": "inline"},
    )


class _Server(uvicorn.Server):
    """Uvicorn beside other work of the same loop: signals stay with the test runner."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        http: client with its address.
    """

    http: httpx.AsyncClient
    state: ServerState

    @property
    def engine(self) -> Engine:
        return self.state.client.engine


@asynccontextmanager
async def running_server(
    executor: Callable[[], Executor],
    *,
    config: ServerConfig | None = None,
    deployment: ResolvedDeployment | None = None,
    start_engine: bool = True,
    max_queued: int = 4,
) -> AsyncIterator[Running]:
    """Serve until the block ends; then everything is closed."""
    supervisor = WorkerSupervisor(executor, warm_up=None, sleep=lambda _: None)
    engine = Engine(lambda _: supervisor, EngineMetrics(NAME), max_queued=max_queued)
    client = EngineClient(deployment or tiny_deployment(), engine, tiny_prompt)
    state = ServerState(client, config or ServerConfig((NAME,)))
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(create_app(state), log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    if start_engine:
        await asyncio.to_thread(engine.start)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            yield Running(http, state)
    finally:
        await asyncio.to_thread(engine.close)
        server.should_exit = True
        await serving
        listener.close()
