"""What carries a chunk of 832x480 on one machine costs: processes, Ray, a proxy."""

import statistics
import time

import numpy as np
import psutil
import pytest

from tests.deploy.haproxy import haproxy, needs_haproxy
from tests.deploy.pods import large_world, pod
from tests.helpers.faults import process_ids
from tests.helpers.fixtures.carriers import CARRIERS, group_config, group_executor, raylets
from tests.helpers.sessions import small_request
from tests.helpers.socket_client import socket_client
from vllm_omni.diffusion.data import DiffusionParallelConfig, RayConfig
from vllm_omni.diffusion.messages import ChunkPlan, ChunkTimings, GroupCapacity
from vllm_omni.diffusion.worker.process import Done, SharedChunk, Stop

__all__ = ["raylets"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

ROUNDS, CHUNKS = 4, 15
MOST_ADDED_MS = 12.0
MOST_PROXY_CPU_MS = 1.0
WORLD = large_world("9.5M", num_frames=12 * CHUNKS - 3)


def answering_main(task, pipe, pixels):
    """A rank that has a chunk of noise at once; the root hands it out."""
    pipe.send(Done(GroupCapacity(1, num_pages=1, page_tokens=1, page_bytes=1, window_frames=1)))
    frames = np.random.default_rng(0).integers(0, 256, (12, 480, 832, 3), dtype=np.uint8)
    while not isinstance(command := pipe.recv(), Stop):
        if isinstance(command, ChunkPlan) and task.rank == 0:
            slot = pixels.write(frames)
            shape, dtype = frames.shape, frames.dtype.str
            pipe.send(SharedChunk(slot, dtype, shape, ChunkTimings()))
        pipe.send(Done(ChunkTimings() if isinstance(command, ChunkPlan) else None))


def processor_s(executor) -> float:
    """Processor time of this process, the ranks and, with Ray, the raylets that hold pixels."""
    ranks = [psutil.Process(pid) for pid in process_ids(executor.group)]
    raylets_of_ranks = {rank.parent() for rank in ranks} - {psutil.Process()}
    times = [each.cpu_times() for each in {psutil.Process(), *ranks, *raylets_of_ranks}]
    return sum(one.user + one.system for one in times)


def test_what_ray_adds_to_a_chunk_on_one_machine(raylets):  # noqa: ARG001 it has to be there
    executors, seen, cpu_ms = {}, {}, {}
    for carrier in CARRIERS:
        config = group_config(
            carrier, parallel=DiffusionParallelConfig(ulysses_degree=2), ray=RayConfig()
        )
        executors[carrier] = group_executor(config, answering_main)
        executors[carrier].start()
        executors[carrier].open_session("s", small_request())
        seen[carrier], cpu_ms[carrier] = [], []
    for _ in range(ROUNDS):
        for carrier, executor in executors.items():
            before_s = processor_s(executor)
            for index in range(CHUNKS):
                began_s = time.perf_counter()
                got = []
                executor.run_chunk(ChunkPlan("s", index), got.append)
                seen[carrier].append((time.perf_counter() - began_s) * 1000)
            cpu_ms[carrier].append((processor_s(executor) - before_s) * 1000 / CHUNKS)
    for carrier, executor in executors.items():
        executor.shutdown()
        print(
            f"{carrier}: {min(seen[carrier]):.1f} ms at best, "
            f"{statistics.median(seen[carrier]):.1f} in the median, "
            f"{statistics.median(cpu_ms[carrier]):.1f} ms of CPU a chunk"
        )
    assert min(seen["ray"]) - min(seen["mp"]) < MOST_ADDED_MS


def used_ms(pid: int) -> float:
    """Processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return (times.user + times.system) * 1000


async def transfers_ms(url: str) -> list[float]:
    """Watch a world; how long after its metadata, which it is sent with, each chunk is there."""
    took, heard_s = [], 0.0
    async with socket_client(url) as client:
        await client.say(WORLD)
        while isinstance(message := await client.hear(120), bytes) or (
            message["type"] != "session.done"
        ):
            if isinstance(message, bytes):
                took.append((time.perf_counter() - heard_s) * 1000)
            heard_s = time.perf_counter()
        assert len(took) == CHUNKS
        assert len(client.video) / CHUNKS == pytest.approx(1e6, rel=0.1)
    return took


@needs_haproxy
async def test_what_a_proxy_adds_to_a_chunk():
    with pod() as server, haproxy(*[f"127.0.0.1:{server.port}"] * 2) as proxy:
        seen = {server.url: [], proxy.url: []}
        proxy_ms = 0.0
        for _ in range(ROUNDS):
            seen[server.url] += await transfers_ms(server.url)
            before_ms = used_ms(proxy.process.pid)
            seen[proxy.url] += await transfers_ms(proxy.url)
            proxy_ms += (used_ms(proxy.process.pid) - before_ms) / (ROUNDS * CHUNKS)
    for name, times in zip(("bare", "haproxy"), seen.values(), strict=True):
        print(f"{name}: {min(times):.1f} ms at best, {statistics.median(times):.1f} in the median")
    print(f"haproxy: {proxy_ms:.2f} ms of CPU a chunk")
    assert proxy_ms <= MOST_PROXY_CPU_MS
