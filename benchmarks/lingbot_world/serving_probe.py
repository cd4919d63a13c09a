"""The API process of a server with clocks in it and workers that hand out frames made before.

    python -m benchmarks.lingbot_world.serving_probe MODEL --port 8000 --output figures.json

Everything between worker and client is the product's: pipes, shared memory, engine, encoder,
socket. What is written at its end are times per chunk and the gaps of a 5 ms ticker on the event
loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vllm_omni.config.resolve import resolve
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES, chunk_pixel_frames
from vllm_omni.diffusion.messages import ChunkPlan, ChunkResult, ChunkTimings, GroupCapacity
from vllm_omni.diffusion.worker.process import (
    Done,
    OpenSession,
    SharedChunk,
    Stop,
    WorkerTask,
)
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server import app, state
from vllm_omni.entrypoints.server.channel import SocketChannel
from vllm_omni.entrypoints.server.protocol import VideoChunkMetadata
from vllm_omni.outputs.media import ChunkEncoder

TICK_S = 0.005
DEPLOY = Path(__file__).parent / "configs" / "cpu_tiny.yaml"


@dataclass
class Clocks:
    """Times of one session, by chunk, in seconds of the system-wide monotonic clock.

    Attributes:
        sent_s: when the last byte was handed to the kernel.
        process_cpu_s: CPU time of the whole process when the chunk had been sent.
        ticks_s: every time that the ticker ran.
    """

    ready_s: list[float] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    encode_cpu_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    process_cpu_s: list[float] = field(default_factory=list)
    ticks_s: list[float] = field(default_factory=list)


CLOCKS = Clocks()


class TimedEncoder(ChunkEncoder):
    """Notes how long a chunk is encoded."""

    def encode(self, frames: UInt8[np.ndarray, "pixel_frames height width 3"]) -> bytes:
        """See the base class."""
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        payload = super().encode(frames)
        CLOCKS.encode_s.append(time.monotonic() - began_s)
        CLOCKS.encode_cpu_s.append(time.thread_time() - began_cpu_s)
        return payload


class TimedChannel(SocketChannel):
    """Notes when a chunk has left."""

    async def send_chunk(self, metadata: VideoChunkMetadata, payload: bytes) -> None:
        """See the base class."""
        await super().send_chunk(metadata, payload)
        CLOCKS.sent_s.append(time.monotonic())
        CLOCKS.process_cpu_s.append(time.process_time())


class TimedExecutor(MultiprocExecutor):
    """Notes when the worker had a chunk."""

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """See the base class."""

        def noted(result: ChunkResult) -> None:
            CLOCKS.ready_s.append(result.ready_s)
            deliver(result)

        return super().run_chunk(plan, noted)


class TickingServer(app.EngineServer):
    """Runs the ticker beside the application."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See the base class."""
        ticker = asyncio.create_task(_tick(), name="ticker")
        try:
            await super().serve(sockets)
        finally:
            ticker.cancel()


async def _tick() -> None:
    while True:
        CLOCKS.ticks_s.append(time.monotonic())
        await asyncio.sleep(TICK_S)


def moving_frames(height: int, width: int) -> UInt8[np.ndarray, "pixel_frames height width 3"]:
    """A textured scene that glides: as hard to encode as a real one."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 8 + 1, width // 8 + CHUNK_PIXEL_FRAMES, 3))
    scene = np.kron(coarse, np.ones((8, 8, 1))) + random.normal(0, 4, (1, 1, 3))
    scene += random.normal(0, 6, scene.shape)
    pixels = scene.clip(0, 255).astype(np.uint8)
    return np.stack([pixels[:height, 3 * i : 3 * i + width] for i in range(CHUNK_PIXEL_FRAMES)])


def prebuilt_main(chunk_s: float, task: WorkerTask, pipe: Connection, pixels: SharedBytes) -> None:
    """A worker process without a model: each chunk takes ``chunk_s`` and is always the same."""
    del task
    frames, encoder = moving_frames(16, 16), None
    pipe.send(
        Done(GroupCapacity(1, num_pages=10**6, page_tokens=128, page_bytes=1, window_frames=9))
    )
    while not isinstance(command := pipe.recv(), Stop):
        if isinstance(command, OpenSession):
            size = (command.request.width, command.request.height)
            frames = moving_frames(*reversed(size))
            if (video := command.request.video) is not None:
                encoder = ChunkEncoder(*size, command.request.fps, video.options, video.codec)
        if isinstance(command, ChunkPlan):
            time.sleep(chunk_s)
            data = frames[: chunk_pixel_frames(command.chunk_index)]
            if encoder is not None:
                data = np.frombuffer(encoder.encode(data), np.uint8)
            slot = pixels.write(data)
            pipe.send(SharedChunk(slot, data.dtype.str, data.shape, ChunkTimings()))
            pipe.send(Done(ChunkTimings()))
        else:
            pipe.send(Done(0))


def _engine_client(model: str, chunk_s: float, encode_on: str) -> EngineClient:
    changes = {"encode_on": encode_on}
    deployment = resolve(model, deploy_config=DEPLOY, executor="mp", overrides=changes)
    # By its importable name: workers are started from it.
    from benchmarks.lingbot_world import serving_probe

    main_of_worker = partial(serving_probe.prebuilt_main, chunk_s)
    supervisor = WorkerSupervisor(
        lambda: TimedExecutor(deployment.config, worker_main=main_of_worker), warm_up=None
    )
    engine = Engine(supervisor, EngineMetrics("probe"), max_queued=1)
    tokenize = deployment.model.load_tokenizer(Path(deployment.config.model))
    return EngineClient(deployment, engine, tokenize)


def main() -> int:
    """Serve until SIGTERM, then write what was noted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chunk-ms", type=float, default=250.0)
    parser.add_argument("--encode-on", choices=("api", "worker"), default="api")
    args = parser.parse_args()
    state.ChunkEncoder = TimedEncoder
    app.SocketChannel = TimedChannel
    app.EngineServer = TickingServer
    client = _engine_client(args.model, args.chunk_ms / 1000.0, args.encode_on)
    server = ServerConfig(("probe",), log_level="warning", access_log=False)
    with socket.create_server(("127.0.0.1", args.port)) as listener:
        status = app.serve_engine(client, server=server, listener=listener)
    args.output.write_text(json.dumps(asdict(CLOCKS)))
    return status


if __name__ == "__main__":
    sys.exit(main())
