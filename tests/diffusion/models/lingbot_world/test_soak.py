"""Long rollouts: nothing grows, nothing slows down."""

import gc
import resource
import time

import pytest
import torch

from tests.helpers.model_builders import keys_request, tiny_worker
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SIZE = VideoGeometry(16, 32)
SETTLED = 50
"""Chunks after which window, condition and allocator have their final size."""
RSS_GOAL_BYTES = 2 * 2**20


def live_tensor_bytes() -> int:
    """Bytes of all storages that tensors in this process hold."""
    storages = {}
    for item in gc.get_objects():
        # By type: asking some lazy objects for their class makes them warn.
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def soak(num_chunks: int, sample_every: int) -> tuple[list[int], int, list[float]]:
    """Live tensor bytes at each sample, resident growth after settling, seconds per chunk."""
    worker, live, seconds, settled = tiny_worker(), [], [], 0
    worker.open_session("soak", keys_request(num_chunks, geometry=SIZE))
    try:
        for chunk in range(num_chunks):
            started = time.perf_counter()
            worker.run_chunk(ChunkPlan("soak", chunk), lambda _: None)
            seconds.append(time.perf_counter() - started)
            if chunk == SETTLED:
                settled = resident_bytes()
            if chunk >= SETTLED and (chunk - SETTLED) % sample_every == 0:
                gc.collect()
                live.append(live_tensor_bytes())
    finally:
        worker.close_session("soak")
    return live, resident_bytes() - settled, seconds


def report(live: list[int], growth: int, seconds: list[float]) -> None:
    early, late = seconds[SETTLED:150], seconds[-100:]
    print(
        f"\n{len(seconds)} chunks at {SIZE}: live tensors {live[-1]} bytes, resident growth "
        f"{growth / 2**20:.2f} MiB after chunk {SETTLED} (goal {RSS_GOAL_BYTES / 2**20:.0f} MiB), "
        f"{1e3 * sum(early) / len(early):.1f} ms per chunk from {SETTLED} to 150, "
        f"{1e3 * sum(late) / len(late):.1f} ms in the last {len(late)}"
    )


@pytest.mark.advanced_model
@pytest.mark.timeout(600)
def test_150_chunks_hold_the_same_bytes():
    """Exact for tensors; resident memory has a ceiling of ten times its goal."""
    live, growth, seconds = soak(150, sample_every=9)
    report(live, growth, seconds)
    assert len(set(live)) == 1
    assert growth < 10 * RSS_GOAL_BYTES


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_1000_chunks_hold_the_same_bytes_and_speed():
    """Past latent frame 1024, where tables of another design would end."""
    live, growth, seconds = soak(1000, sample_every=95)
    report(live, growth, seconds)
    assert len(set(live)) == 1
    assert growth < 10 * RSS_GOAL_BYTES
    early, late = sorted(seconds[SETTLED:150]), sorted(seconds[-100:])
    # Medians, with room for a shared machine: a chunk that slowed with the length of the rollout
    # would be several times slower after a thousand.
    assert late[50] < 2 * early[50]
