"""Worker processes: death, silence, signals, environment, and what is left afterwards."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.faults import (
    disagreeing_main,
    faulty_main,
    process_ids,
    refusing_main,
    telling_main,
)
from tests.helpers.sessions import make_chunks, make_rollout, small_request
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor import multiprocess
from vllm_omni.diffusion.executor.launch import WorkerMain
from vllm_omni.diffusion.executor.multiprocess import ChunkLimit, MultiprocExecutor
from vllm_omni.diffusion.executor.worker_group import WorkerGroup
from vllm_omni.diffusion.messages import ChunkPlan
from vllm_omni.diffusion.worker.process import WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import (
    CheckpointError,
    OutOfKVMemoryError,
    SessionClosedError,
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


@pytest.fixture
def two_ranks():
    before = shared_memory_files()
    made = MultiprocExecutor(tiny_config("mp", parallel=TWO_RANKS), worker_main=faulty_main)
    made.start()
    meeting_place = Path(made.group.rendezvous)
    assert meeting_place.is_dir()
    yield made
    made.shutdown()
    assert shared_memory_files() <= before
    assert not meeting_place.exists()
    assert all(p.status() != psutil.STATUS_ZOMBIE for p in worker_processes())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_a_new_group_is_right(two_ranks, rank):
    request, session_id = small_request(num_chunks=3), f"die:1:{rank}"
    expected = make_rollout(two_ranks, request)
    two_ranks.open_session(session_id, request)
    make_chunks(two_ranks, session_id, range(1))
    started_s = time.monotonic()
    with pytest.raises(WorkerFailedError, match=rf"rank {rank} ended with exit code -9 .SIGKILL"):
        make_chunks(two_ranks, session_id, range(1, 2))
    found_s = time.monotonic() - started_s
    with pytest.raises(WorkerFailedError, match="not running"):
        two_ranks.close_session(session_id)
    two_ranks.shutdown()
    second = MultiprocExecutor(tiny_config("mp", parallel=TWO_RANKS), worker_main=faulty_main)
    second.start()
    recovered_s = time.monotonic() - started_s
    again = make_rollout(second, request)
    second.shutdown()
    print(f"dead rank found after {found_s:.2f} s, new group ready after {recovered_s:.2f} s")
    assert found_s < FOUND_WITHIN_S
    # Bitwise: a new generation is like the first.
    assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_rank_that_raises_inside_a_chunk_ends_the_group(two_ranks):
    two_ranks.open_session("bug:0:1", small_request())
    with pytest.raises(WorkerFailedError, match="rank 1 ended with exit code 1 after Session"):
        make_chunks(two_ranks, "bug:0:1", range(1))


def test_ranks_refuse_together_and_go_on(two_ranks):
    request = small_request(num_chunks=2)
    two_ranks.open_session("a", request)
    with pytest.raises(OutOfKVMemoryError):
        two_ranks.open_session("b", request)
    with pytest.raises(SessionClosedError, match="b is not open"):
        two_ranks.run_chunk(ChunkPlan("b", 0), lambda _: None)
    make_chunks(two_ranks, "a", range(2))
    two_ranks.close_session("a")
    make_rollout(two_ranks, request)


def test_ranks_that_share_weights_refuse_together_before_any_exchange():
    """Opening must not wait for a rank that has no pages: exchanges come with the first chunk."""
    made = MultiprocExecutor(
        tiny_config("mp", parallel=DiffusionParallelConfig(tensor_parallel_size=2)),
        worker_main=faulty_main,
    )
    made.start()
    request = small_request(num_chunks=2)
    expected = make_rollout(made, request)
    began_s = time.monotonic()
    for rank in (0, 1):
        with pytest.raises(OutOfKVMemoryError, match="injected"):
            made.open_session(f"full:0:{rank}", request)
    assert time.monotonic() - began_s < FOUND_WITHIN_S
    again = make_rollout(made, request)
    made.shutdown()
    # Bitwise: no exchange of a refused session was left over for the next one.
    assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))


def test_signals_do_not_end_a_worker():
    made = MultiprocExecutor(tiny_config("mp"))
    made.start()
    make_rollout(made, small_request(num_chunks=1))
    for pid in process_ids(made.group):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    make_rollout(made, small_request(num_chunks=1))
    made.shutdown()


def test_a_chunk_that_takes_too_long_ends_the_group():
    made = MultiprocExecutor(tiny_config("mp", chunk_timeout_s=5.0), worker_main=faulty_main)
    made.start()
    made.open_session("hang:2:0", small_request(num_chunks=3))
    make_chunks(made, "hang:2:0", range(2))  # cold
    pids = process_ids(made.group)
    with pytest.raises(WorkerFailedError, match=r"chunk 2 of session hang:2:0 in time.*timeout"):
        make_chunks(made, "hang:2:0", range(2, 3))
    assert not any(psutil.pid_exists(pid) for pid in pids)
    made.shutdown()


def test_a_killed_rank_between_commands_is_found_by_the_next():
    made = MultiprocExecutor(tiny_config("mp"))
    made.start()
    os.kill(process_ids(made.group)[0], signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match="exit code -9"):
        made.open_session("a", small_request())
    made.shutdown()


def test_a_look_finds_a_rank_that_was_killed_without_a_command(two_ranks):
    two_ranks.check_alive()
    victim = process_ids(two_ranks.group)[1]
    os.kill(victim, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(victim)], timeout=10)
    with pytest.raises(WorkerFailedError, match=r"rank 1 ended with exit code -9 \(SIGKILL\)"):
        two_ranks.check_alive()
    with pytest.raises(WorkerFailedError, match="not running"):
        two_ranks.check_alive()


def test_waiting_costs_no_processor_time():
    made = MultiprocExecutor(tiny_config("mp", chunk_timeout_s=4.0), worker_main=faulty_main)
    made.start()
    made.open_session("hang:2:0", small_request(num_chunks=3))
    make_chunks(made, "hang:2:0", range(2))  # cold
    began = time.thread_time()
    with pytest.raises(WorkerFailedError):
        make_chunks(made, "hang:2:0", range(2, 3))
    assert time.thread_time() - began < 0.5
    made.shutdown()


def test_environment_is_set_before_torch_loads():
    made = MultiprocExecutor(
        tiny_config("mp", env={"FAULTS_MARKER": "here"}), worker_main=telling_main
    )
    with pytest.raises(CheckpointError, match="torch loaded: False, marker: here"):
        made.start()
    assert "FAULTS_MARKER" not in os.environ


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_to_start_is_heard_while_another_loads(rank):
    made = two_ranks_of(refusing_main, refusing=rank)
    with pytest.raises(CheckpointError, match=f"rank {rank} found another model"):
        made.start()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_to_start_when_another_is_ready_keeps_its_reason(rank):
    made = two_ranks_of(disagreeing_main, refusing=rank)
    with pytest.raises(OutOfKVMemoryError, match="no room on this rank"):
        made.start()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


def test_of_several_reasons_the_one_that_ends_the_group_counts():
    made = two_ranks_of(disagreeing_main, refusing=None)
    made.start()
    with pytest.raises(WorkerFailedError, match="dead"):
        made.peak_bytes()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


def two_ranks_of(worker_main, *, refusing: int | None) -> MultiprocExecutor:
    config = tiny_config("mp", parallel=TWO_RANKS, env={"REFUSING_RANK": str(refusing)})
    return MultiprocExecutor(config, worker_main=worker_main)


def test_calls_may_come_from_any_thread():
    made = MultiprocExecutor(tiny_config("mp"))
    chunks = []

    def work() -> None:
        made.start()
        chunks.extend(make_rollout(made, small_request(num_chunks=1)))
        made.shutdown()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert chunks[0].shape == (9, 64, 96, 3)


def silent_main(_task: WorkerTask, _pipe: Connection, _pixels: SharedBytes) -> None:
    """Loads for ever."""
    time.sleep(600)


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


def test_a_shutdown_of_a_start_that_waits_for_the_model_is_prompt():
    """A rank that loads would not hear that it is to stop."""
    made = MultiprocExecutor(tiny_config("mp"), worker_main=silent_main)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(made.start)
        deadline_s = time.monotonic() + 30
        while made._group is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.2)
        began_s = time.monotonic()
        made.shutdown()
        with pytest.raises(WorkerFailedError):
            starting.result(20)
    assert time.monotonic() - began_s < 5


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


@pytest.mark.parametrize("ending", ["time.sleep(600)", "sys.exit(3)", "raise SystemError"])
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
    ranks = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
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
