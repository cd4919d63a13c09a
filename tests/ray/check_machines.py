"""Machines of a Ray cluster that end, freeze or lose their head, with the settings that we ship."""

import os
import signal
import time

import numpy as np
import psutil
import pytest

from tests.helpers.faults import process_ids
from tests.helpers.fixtures.carriers import group_config
from tests.helpers.raylets import raylets_of
from tests.helpers.sessions import make_chunks, make_rollout, small_request
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import WorkerFailedError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

TWO_RANKS = DiffusionParallelConfig(ulysses_degree=2)
HEADLESS_S = 150.0


@pytest.fixture
def cluster():
    with raylets_of(1, 1) as made:
        yield made


@pytest.fixture(scope="module")
def expected():
    """What processes make of the request."""
    executor = MultiprocExecutor(group_config("mp", parallel=TWO_RANKS))
    executor.start()
    made = make_rollout(executor, small_request(num_chunks=3))
    executor.shutdown()
    return made


@pytest.fixture
def supervisor(cluster):  # noqa: ARG001 it has to be there
    config = group_config("ray", parallel=TWO_RANKS)
    made = WorkerSupervisor(lambda: create_executor(config), warm_up=None)
    made.start()
    yield made
    made.shutdown()


def assert_makes(supervisor, expected):
    # Bitwise: what carries the ranks only moves data.
    made = make_rollout(supervisor.executor, small_request(num_chunks=3))
    assert all(np.array_equal(one, two) for one, two in zip(made, expected, strict=True))


def _run_on(executor):
    executor.open_session("told", small_request(num_chunks=500))
    make_chunks(executor, "told", range(500))


def assert_told(supervisor, lost_s: float, *, within_s: float) -> None:
    """Make chunks until that raises: rank 1 is gone, and rank 0 may be the first to notice."""
    executor = supervisor.executor
    with pytest.raises(WorkerFailedError, match=r"rank [01] .*ended") as told:
        _run_on(executor)
    told_s = time.monotonic() - lost_s
    print(f"told after {told_s:.2f} s: {told.value}")
    assert told_s <= within_s


def test_on_ray_a_lost_raylet_is_told_and_the_next_group_is_right(cluster, supervisor, expected):
    assert_makes(supervisor, expected)
    lost_s = time.monotonic()
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    assert_told(supervisor, lost_s, within_s=5)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    supervisor.relaunch()
    assert_makes(supervisor, expected)


def test_on_ray_a_frozen_machine_is_told(supervisor):
    victim = process_ids(supervisor.executor.group)[1]
    raylet = psutil.Process(victim).ppid()
    lost_s = time.monotonic()
    for pid in (raylet, victim):
        os.kill(pid, signal.SIGSTOP)
    try:
        assert_told(supervisor, lost_s, within_s=20)
    finally:
        for pid in (raylet, victim):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_on_ray_worlds_go_on_without_the_head(cluster, supervisor, expected):
    assert_makes(supervisor, expected)
    cluster.head_node.kill_gcs_server()
    lost_s = time.monotonic()
    worlds, slowest_s = 0, 0.0
    while (began_s := time.monotonic()) < lost_s + HEADLESS_S:
        assert_makes(supervisor, expected)
        supervisor.executor.check_alive()
        worlds, slowest_s = worlds + 1, max(slowest_s, time.monotonic() - began_s)
        time.sleep(1.0)
    print(f"{worlds} worlds in {began_s - lost_s:.0f} s, the slowest of {slowest_s:.1f} s")
    supervisor.shutdown()
