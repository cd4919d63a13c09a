"""A server in a process of its own with frames of noise: ``python -m tests.helpers.pod PORT``.

Its workers are fake, its sockets, its encoder and its memory are real. A client that reads nothing
is given up after four seconds.
"""

import socket
import sys

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, tiny_deployment
from tests.helpers.tiny import tiny_prompt
from vllm_omni.config.server import ServerConfig
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import EngineServer, create_app
from vllm_omni.entrypoints.server.realtime_video import Timers
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.transport import uvicorn_config


def serve(port: int) -> int:
    """Serve until a signal comes; returns the exit status."""
    executor = FakeExecutor(noise=True)
    executor.num_pages = 1000
    supervisor = WorkerSupervisor(lambda: executor, warm_up=None)
    engine = Engine(lambda _: supervisor, EngineMetrics(MODEL), max_queued=4)
    config = ServerConfig((MODEL,))
    state = ServerState(EngineClient(tiny_deployment(), engine, tiny_prompt), config)
    app = create_app(state, Timers(stall=4.0, poll=0.1))
    server = EngineServer(uvicorn_config(app, config), state)
    server.run(sockets=[socket.create_server(("127.0.0.1", port))])
    return server.exit_status


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
