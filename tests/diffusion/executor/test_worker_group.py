"""A worker group that one thread talks to and another one ends."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import psutil
import pytest

from tests.helpers.faults import process_ids, silent_main
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor.worker_group import WorkerGroup
from vllm_omni.diffusion.worker.process import Done, Report, WorkerMain, WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import WorkerFailedError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

TWO_RANKS = DiffusionParallelConfig(ulysses_degree=2)


def talking_main(_task: WorkerTask, pipe: Connection, _pixels: SharedBytes) -> None:
    """Says the same again and again: whoever listens is as often between two waits as in one."""
    while True:
        pipe.send(Done(None))


def launched(worker_main: WorkerMain, **settings: object) -> WorkerGroup:
    group = WorkerGroup(tiny_config("mp", **settings))
    group.launch(worker_main)
    return group


def listen(group: WorkerGroup) -> None:
    """Converse with a group until that raises."""
    while True:
        group.check_alive()
        for rank in range(group.world_size):
            group.receive(rank, deadline_s=time.monotonic() + 60, doing="talking")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("worker_main", [talking_main, silent_main])
def test_a_group_may_be_ended_under_a_conversation_at_any_moment(worker_main):
    before = None
    for attempt in range(30):
        group = launched(worker_main, parallel=TWO_RANKS)
        pids = process_ids(group)
        with ThreadPoolExecutor() as pool:
            listening = pool.submit(listen, group)
            time.sleep(0.002 * (attempt % 10))
            for ending in [pool.submit(group.kill), pool.submit(group.stop)]:
                ending.result(20)
            assert type(listening.exception(20)) is WorkerFailedError
        assert not any(psutil.pid_exists(pid) for pid in pids)
        # The first launch opens the line to the fork server, which stays.
        before = open_descriptors() if before is None else before
    assert open_descriptors() <= before


def test_ending_a_group_again_does_nothing_and_it_says_that_it_was_ended():
    group = launched(silent_main)
    group.kill()
    group.kill()
    group.stop()
    for call in (
        group.check_alive,
        lambda: group.send(Report("peak")),
        lambda: group.receive(0, deadline_s=0.0, doing="nothing"),
        lambda: group.read_pixels(0, (1,), "uint8"),
    ):
        with pytest.raises(WorkerFailedError, match="was ended"):
            call()
