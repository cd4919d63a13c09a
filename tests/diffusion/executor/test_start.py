"""The time limits of a start: what moves them on, and what exchanges are allowed."""

import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.faults import slow_main
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.process import Done, Loading, WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

TWO_RANKS = DiffusionParallelConfig(ulysses_degree=2)
READY = Done(GroupCapacity(1, num_pages=1, page_tokens=1, page_bytes=1, window_frames=1))


def uneven_main(task: WorkerTask, pipe: Connection, _pixels: SharedBytes) -> None:
    """Rank 1 loads with more news than a pipe holds; rank 0 says nothing until it has loaded."""
    loaded = Path(task.rendezvous) / "loaded"
    if task.rank == 1:
        for _ in range(10):
            time.sleep(0.5)
            for _ in range(60):
                pipe.send(Loading())
        loaded.touch()
    while not loaded.exists():
        time.sleep(0.05)
    pipe.send(READY)
    pipe.recv()


def test_a_start_may_take_longer_than_its_limit_while_weights_arrive():
    config = tiny_config("mp", stage_init_timeout_s=4.0)
    executor = MultiprocExecutor(config, worker_main=slow_main)
    assert executor.start().sessions == 1
    executor.shutdown()


def test_the_news_of_every_rank_are_read_and_move_the_limit():
    config = tiny_config("mp", parallel=TWO_RANKS, stage_init_timeout_s=4.0)
    executor = MultiprocExecutor(config, worker_main=uneven_main)
    assert executor.start().sessions == 1
    executor.shutdown()


@pytest.mark.parametrize(("chunk_s", "allowed_s"), [(None, 300.0), (30.0, 300.0), (600.0, 600.0)])
def test_a_short_limit_of_chunks_leaves_exchanges_that_of_the_start(
    monkeypatch, chunk_s, allowed_s
):
    class Met(Exception):  # noqa: N818
        pass

    def join_world(place):
        assert place.timeout_s == allowed_s
        raise Met

    monkeypatch.setattr(process, "join_world", join_world)
    config = tiny_config(
        "mp", parallel=TWO_RANKS, chunk_timeout_s=chunk_s, stage_init_timeout_s=300.0
    )
    with pytest.raises(Met):
        process._join(WorkerTask(config, 0, "/nowhere", 20, None))
