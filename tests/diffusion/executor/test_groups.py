"""Groups of ranks, whatever carries them: death, silence, refusal, and a new group afterwards."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from tests.helpers.faults import (
    disagreeing_main,
    faulty_main,
    process_ids,
    refusing_main,
    silent_main,
    telling_main,
)
from tests.helpers.fixtures.carriers import (
    KILLED,
    carrier,
    group_config,
    group_executor,
    raylets,
)
from tests.helpers.mark import advanced
from tests.helpers.sessions import make_chunks, make_rollout, small_request
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.messages import ChunkPlan
from vllm_omni.errors import (
    CheckpointError,
    OutOfKVMemoryError,
    SessionClosedError,
    WorkerFailedError,
)

__all__ = ["carrier", "raylets"]

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


def look_until_it_raises(executor: MultiprocExecutor) -> None:
    """Look at ranks again and again: a death may be told a moment after it."""
    deadline_s = time.monotonic() + FOUND_WITHIN_S
    while time.monotonic() < deadline_s:
        executor.check_alive()
        time.sleep(0.01)


@pytest.fixture
def two_ranks(carrier):
    made = group_executor(group_config(carrier, parallel=TWO_RANKS), faulty_main)
    made.start()
    pids = process_ids(made.group)
    yield made
    made.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, advanced(1)])
def test_a_killed_rank_is_named_and_a_new_group_is_right(carrier, two_ranks, rank):
    request, session_id = small_request(num_chunks=3), f"die:1:{rank}"
    expected = make_rollout(two_ranks, request)
    two_ranks.open_session(session_id, request)
    make_chunks(two_ranks, session_id, range(1))
    started_s = time.monotonic()
    with pytest.raises(WorkerFailedError, match=f"rank {rank} {KILLED[carrier]}"):
        make_chunks(two_ranks, session_id, range(1, 2))
    found_s = time.monotonic() - started_s
    with pytest.raises(WorkerFailedError, match="not running"):
        two_ranks.close_session(session_id)
    two_ranks.shutdown()
    second = group_executor(group_config(carrier, parallel=TWO_RANKS), faulty_main)
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
    with pytest.raises(WorkerFailedError, match=r"rank 1 ended.* after Session"):
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


def test_ranks_that_share_weights_refuse_together_before_any_exchange(carrier):
    """Opening must not wait for a rank that has no pages: exchanges come with the first chunk."""
    shared = DiffusionParallelConfig(tensor_parallel_size=2)
    made = group_executor(group_config(carrier, parallel=shared), faulty_main)
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


def test_a_chunk_that_takes_too_long_ends_the_group(carrier):
    made = group_executor(group_config(carrier, chunk_timeout_s=5.0), faulty_main)
    made.start()
    made.open_session("hang:2:0", small_request(num_chunks=3))
    make_chunks(made, "hang:2:0", range(2))  # cold
    pids = process_ids(made.group)
    with pytest.raises(WorkerFailedError, match=r"chunk 2 of session hang:2:0 in time.*timeout"):
        make_chunks(made, "hang:2:0", range(2, 3))
    assert not any(psutil.pid_exists(pid) for pid in pids)
    made.shutdown()


def test_a_killed_rank_between_commands_is_found_by_the_next(carrier):
    made = group_executor(group_config(carrier))
    made.start()
    os.kill(process_ids(made.group)[0], signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match=KILLED[carrier]):
        made.open_session("a", small_request())
    made.shutdown()


def test_a_look_finds_a_rank_that_was_killed_without_a_command(carrier, two_ranks):
    two_ranks.check_alive()
    victim = process_ids(two_ranks.group)[1]
    os.kill(victim, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(victim)], timeout=10)
    with pytest.raises(WorkerFailedError, match=f"rank 1 {KILLED[carrier]}"):
        look_until_it_raises(two_ranks)
    with pytest.raises(WorkerFailedError, match="not running"):
        two_ranks.check_alive()


def test_waiting_costs_no_processor_time(carrier):
    made = group_executor(group_config(carrier, chunk_timeout_s=4.0), faulty_main)
    made.start()
    made.open_session("hang:2:0", small_request(num_chunks=3))
    make_chunks(made, "hang:2:0", range(2))  # cold
    began = time.thread_time()
    with pytest.raises(WorkerFailedError):
        make_chunks(made, "hang:2:0", range(2, 3))
    assert time.thread_time() - began < 0.5
    made.shutdown()


def test_environment_is_set_before_torch_loads(carrier):
    made = group_executor(group_config(carrier, env={"FAULTS_MARKER": "here"}), telling_main)
    with pytest.raises(CheckpointError, match="torch loaded: False, marker: here"):
        made.start()
    assert "FAULTS_MARKER" not in os.environ


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_to_start_is_heard_while_another_loads(carrier, rank):
    made = two_ranks_of(carrier, refusing_main, refusing=rank)
    with pytest.raises(CheckpointError, match=f"rank {rank} found another model"):
        made.start()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_to_start_when_another_is_ready_keeps_its_reason(carrier, rank):
    made = two_ranks_of(carrier, disagreeing_main, refusing=rank)
    with pytest.raises(OutOfKVMemoryError, match="no room on this rank"):
        made.start()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


def test_of_several_reasons_the_one_that_ends_the_group_counts(carrier):
    made = two_ranks_of(carrier, disagreeing_main, refusing=None)
    made.start()
    with pytest.raises(WorkerFailedError, match="dead"):
        made.peak_bytes()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group


def two_ranks_of(carrier, worker_main, *, refusing: int | None) -> MultiprocExecutor:
    env = {"REFUSING_RANK": str(refusing)}
    return group_executor(group_config(carrier, parallel=TWO_RANKS, env=env), worker_main)


def test_calls_may_come_from_any_thread(carrier):
    made = group_executor(group_config(carrier))
    chunks = []

    def work() -> None:
        made.start()
        chunks.extend(make_rollout(made, small_request(num_chunks=1)))
        made.shutdown()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert chunks[0].shape == (9, 64, 96, 3)


def test_a_shutdown_of_a_start_that_waits_for_the_model_is_prompt(carrier):
    """A rank that loads would not hear that it is to stop."""
    made = group_executor(group_config(carrier), silent_main)
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
    assert time.monotonic() - began_s < FOUND_WITHIN_S
