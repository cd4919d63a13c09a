"""Worker processes: death, silence, signals, environment, and what is left afterwards."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.faults import process_ids, silent_main
from tests.helpers.mark import advanced
from tests.helpers.sessions import make_rollout, small_request
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor import multiprocess
from vllm_omni.diffusion.executor.multiprocess import ChunkLimit, MultiprocExecutor
from vllm_omni.diffusion.executor.worker_group import WorkerGroup
from vllm_omni.diffusion.messages import ChunkPlan, ChunkTimings
from vllm_omni.diffusion.worker.process import SharedChunk, WorkerMain
from vllm_omni.errors import (
    WorkerFailedError,
)

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

TWO_RANKS = DiffusionParallelConfig(ulysses_degree=2)
FOUND_WITHIN_S = 10.0
"""A dead rank is found at once; this allows for a busy machine."""


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def worker_processes() -> list[psutil.Process]:
    """Processes below this one that hold a pipe of a worker group, zombies included."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE or "forkserver" in "".join(child.cmdline())
    ]


def test_pixels_were_ready_before_their_video():
    made = MultiprocExecutor(tiny_config("mp"))
    made._group = WorkerGroup(made._config)
    slot = made._group._pixels.write(np.zeros(3, np.uint8))
    timings, began_s = ChunkTimings(encode_ms=1e6), time.monotonic()
    result = made._result(ChunkPlan("a", 0), SharedChunk(slot, "|u1", (3,), timings))
    assert 0.0 <= result.ready_s + 1e3 - began_s <= time.monotonic() - began_s
    made.shutdown()


def test_nothing_is_left_of_a_group_that_lost_a_rank():
    before = shared_memory_files()
    made = MultiprocExecutor(tiny_config("mp", parallel=TWO_RANKS))
    made.start()
    meeting_place = Path(made.group.rendezvous)
    assert meeting_place.is_dir()
    os.kill(process_ids(made.group)[1], signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match="exit code -9"):
        made.peak_bytes()
    made.shutdown()
    assert shared_memory_files() <= before
    assert not meeting_place.exists()
    assert all(p.status() != psutil.STATUS_ZOMBIE for p in worker_processes())


def test_signals_do_not_end_a_worker():
    made = MultiprocExecutor(tiny_config("mp"))
    made.start()
    make_rollout(made, small_request(num_chunks=1))
    for pid in process_ids(made.group):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    make_rollout(made, small_request(num_chunks=1))
    made.shutdown()


def test_a_shutdown_before_processes_are_launched_ends_the_start(monkeypatch):
    launching, go_on = threading.Event(), threading.Event()
    launched: list[WorkerGroup] = []

    class SlowLaunch(WorkerGroup):
        def launch(self, worker_main: WorkerMain) -> None:
            launched.append(self)
            launching.set()
            assert go_on.wait(20)
            super().launch(worker_main)

    monkeypatch.setattr(multiprocess, "WorkerGroup", SlowLaunch)
    made = MultiprocExecutor(tiny_config("mp"), worker_main=silent_main)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(made.start)
        assert launching.wait(10)
        made.shutdown()
        go_on.set()
        with pytest.raises(WorkerFailedError, match="was ended"):
            starting.result(FOUND_WITHIN_S)
    assert process_ids(launched[0]) == ()


ORPHANS = """
import sys, time
from tests.helpers.faults import process_ids
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor

if __name__ == "__main__":
    made = MultiprocExecutor(tiny_config("mp", parallel=DiffusionParallelConfig(ulysses_degree=2)))
    made.start()
    print(made.group.rendezvous, *process_ids(made.group), flush=True)
    {ending}
"""
PARENT = """
import sys
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.errors import CheckpointError

if __name__ == "__main__":
    config = OmniDiffusionConfig(
        model={model!r}, dtype="float32", executor="mp", geometry=VideoGeometry(64, 96)
    )
    made = create_executor(config)
    made.start()
    made.shutdown()
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "ending",
    ["time.sleep(600)", advanced("sys.exit(3)"), advanced("raise SystemError")],
)
def test_no_worker_outlives_its_parent(ending, tmp_path):
    """Killed, leaving, or leaving by an error, without a shutdown in any case."""
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS.format(ending=ending))
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    ) as parent:  # fmt: skip
        meeting_place, *pids = parent.stdout.readline().split()
        assert len(pids) == 2
        if "sleep" in ending:
            parent.kill()
        parent.wait(30)
    ranks = [process for process in psutil.process_iter() if process.pid in set(map(int, pids))]
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
    assert not Path(os.fsdecode(meeting_place)).exists()


def test_the_parent_loads_no_torch(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(model=tiny_config("mp").model))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "False"


def test_chunk_limit():
    limit, size = ChunkLimit(None, cold_s=300.0), (480, 832)
    assert limit.seconds(size) == 300.0
    limit.observe(size, 250.0)  # it compiled, and says nothing about the chunks to come
    assert limit.seconds(size) == 300.0
    limit.observe(size, 2.0)
    assert limit.seconds(size) == 60.0
    limit.observe(size, 9.0)
    limit.observe(size, 1.0)
    assert limit.seconds(size) == 90.0


def test_a_fixed_chunk_limit_leaves_the_cold_chunks_the_time_to_compile():
    limit, size = ChunkLimit(30.0, cold_s=300.0), (480, 832)
    for chunk_s in (250.0, 2.0):
        assert limit.seconds(size) == 300.0
        limit.observe(size, chunk_s)
    assert limit.seconds(size) == 30.0
    assert ChunkLimit(600.0, cold_s=300.0).seconds(size) == 600.0


def test_the_first_chunk_of_another_size_is_cold_again():
    limit, warm, other = ChunkLimit(None, cold_s=300.0), (480, 832), (832, 480)
    for chunk_s in (250.0, 2.0):
        limit.observe(warm, chunk_s)
    assert limit.seconds(other) == 300.0
    limit.observe(other, 200.0)
    limit.observe(other, 20.0)
    assert (limit.seconds(warm), limit.seconds(other)) == (60.0, 200.0)
