"""Launches that are cut off, refused half-way, or whose fork server is lost; ranks that freeze.

Each runs in a program of its own, whose fork server loads next to nothing.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.faults import process_ids
from tests.helpers.tiny import tiny_checkpoint_dir, tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor import worker_group
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.executor.worker_group import RankProcess, WorkerGroup
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import WorkerFailedError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

ROOT = Path(__file__).resolve().parents[3]
TWO_RANKS = DiffusionParallelConfig(ulysses_degree=2)
PATIENCE_S = 100.0
"""For a busy machine; what goes wrong here lasts ten minutes."""

PROGRAM = """
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.executor import worker_group
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.executor.worker_group import WorkerGroup
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.worker import process
from vllm_omni.errors import WorkerFailedError

worker_group.PRELOADED = {preloaded!r}
worker_group.model_of = lambda *_: SimpleNamespace(preload=())
config = OmniDiffusionConfig(
    model={model!r}, dtype="float32", executor="mp", geometry=VideoGeometry(64, 96),
    parallel=DiffusionParallelConfig(ulysses_degree=2),
)

def busy_main(task, pipe, pixels):
    process._serve = lambda *_: time.sleep(600)
    process.main(task, pipe, pixels)

def tell(group):
    print(*(worker.process.pid for worker in group._workers), group.rendezvous, flush=True)

def wait_for_loss(group):
    try:
        while True:
            group.check_alive()
            time.sleep(0.05)
    except WorkerFailedError as error:
        print(error, flush=True)

if __name__ == "__main__":
"""

CUT_OFF = """
    executor = MultiprocExecutor(config, worker_main=busy_main)
    def start():
        try:
            executor.start()
        except WorkerFailedError as error:
            print(error, flush=True)
    starting = threading.Thread(target=start)
    starting.start()
    while not Path("loading").exists():
        time.sleep(0.05)
    print(worker_group.forkserver._forkserver._forkserver_pid, flush=True)
    executor.shutdown()
    starting.join()
"""
FORK_SERVER_KILLED = """
    group = WorkerGroup(config)
    group.launch(busy_main)
    tell(group)
    worker_group.kill_fork_server()
    wait_for_loss(group)
    group.kill()
    again = WorkerGroup(config)
    again.launch(busy_main)
    again.check_alive()
    again.kill()
"""
SECOND_RANK_REFUSED = """
    started = worker_group._started
    def refusing(context, worker_main, task, pixels):
        if task.rank == 1:
            tell(group)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return started(context, worker_main, task, pixels)
    worker_group._started = refusing
    group = WorkerGroup(config)
    try:
        group.launch(busy_main)
    except WorkerFailedError as error:
        print(error, flush=True)
    time.sleep(600)
"""
EXECUTOR_KILLED = """
    group = WorkerGroup(config)
    group.launch(busy_main)
    tell(group)
    time.sleep(600)
"""


@contextmanager
def running(body: str, folder: Path, *preloaded: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a folder, from which its fork server imports what is preloaded."""
    script = folder / "program.py"
    head = PROGRAM.format(preloaded=preloaded, model=str(tiny_checkpoint_dir()))
    script.write_text(head + body)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"},
    ) as program:  # fmt: skip
        try:
            yield program
        finally:
            program.kill()


def assert_ended(*pids: str) -> None:
    running = [process for process in psutil.process_iter() if process.pid in set(map(int, pids))]
    _, alive = psutil.wait_procs(running, timeout=PATIENCE_S)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive), alive


def test_a_shutdown_does_not_wait_for_a_fork_server_that_loads(tmp_path):
    (tmp_path / "endless.py").write_text(
        "import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(600)\n"
    )
    with running(CUT_OFF, tmp_path, "endless") as program:
        said, _ = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 0
    fork_server, why = said.splitlines()
    assert "could not be started: the process that forks them ended" in why
    assert_ended(fork_server)


def test_ranks_end_with_a_fork_server_that_is_killed_and_the_next_group_has_another(tmp_path):
    with running(FORK_SERVER_KILLED, tmp_path) as program:
        said, _ = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 0
    told, why = said.splitlines()
    *ranks, meeting_place = told.split()
    assert len(ranks) == 2
    assert "is lost" in why
    assert_ended(*ranks)
    assert not Path(meeting_place).exists()


def test_a_group_of_which_one_rank_is_refused_leaves_no_other(tmp_path):
    with running(SECOND_RANK_REFUSED, tmp_path) as program:
        rank, meeting_place = program.stdout.readline().split()
        assert "could not be started: Resource temporarily" in program.stdout.readline()
        assert_ended(rank)
        assert not Path(meeting_place).exists()


def test_busy_ranks_end_with_their_executor(tmp_path):
    with running(EXECUTOR_KILLED, tmp_path) as program:
        *ranks, meeting_place = program.stdout.readline().split()
        program.kill()
        assert_ended(*ranks)
        assert not Path(meeting_place).exists()


def idle_main(_task: object, _pipe: object, _pixels: object) -> None:
    """Says nothing."""
    time.sleep(600)


@pytest.fixture
def idle_ranks(monkeypatch) -> Iterator[WorkerGroup]:
    monkeypatch.setattr(worker_group, "_STANDSTILL_S", 0.5)
    group = WorkerGroup(tiny_config("mp", parallel=TWO_RANKS))
    group.launch(idle_main)
    yield group
    group.kill()


def stand_still(group: WorkerGroup, rank: int) -> None:
    os.kill(process_ids(group)[rank], signal.SIGSTOP)
    while not group._workers[rank].is_stopped():
        time.sleep(0.01)


def look_until_lost(group: WorkerGroup, *, asked: bool) -> None:
    while True:
        if asked:
            group.receive(0, deadline_s=time.monotonic() + 600, doing="nothing")
        group.check_alive()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asked", [False, True], ids=["idle", "asked"])
def test_a_rank_that_a_signal_has_stopped_is_found_and_ended(idle_ranks, rank, asked):
    stand_still(idle_ranks, rank)
    with pytest.raises(WorkerFailedError, match=f"rank {rank} has been stopped by a signal"):
        look_until_lost(idle_ranks, asked=asked)
    pids = process_ids(idle_ranks)
    idle_ranks.kill()
    assert_ended(*map(str, pids))


def test_a_rank_that_goes_on_is_not_lost(idle_ranks):
    for _ in range(2):
        stand_still(idle_ranks, 1)
        idle_ranks.check_alive()
        os.kill(process_ids(idle_ranks)[1], signal.SIGCONT)
        while idle_ranks._workers[1].is_stopped():
            time.sleep(0.01)
        idle_ranks.check_alive()
        time.sleep(0.6)  # longer than a rank may stand still
    idle_ranks.check_alive()


def test_folders_of_groups_whose_program_was_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, other = tmp_path / "vllm-omni-ranks-dead", tmp_path / "other"
    beside = WorkerGroup(tiny_config("mp", parallel=TWO_RANKS))
    for folder in (dead, other, Path(beside.rendezvous)):
        folder.mkdir(exist_ok=True)
        os.utime(folder, (time.time() - 60,) * 2)
    group = WorkerGroup(tiny_config("mp", parallel=TWO_RANKS))
    assert not dead.exists()
    assert {other, Path(beside.rendezvous), Path(group.rendezvous)} == set(tmp_path.iterdir())
    for one in (beside, group):
        one.kill()
    assert list(tmp_path.iterdir()) == [other]


def test_descriptors_that_run_out_are_a_failure_that_is_tried_again(monkeypatch):
    def refuse() -> SharedBytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SharedBytes, "create", refuse)
    with pytest.raises(WorkerFailedError, match=r"Too many open files.*ulimit -n"):
        MultiprocExecutor(tiny_config("mp")).start()


def test_a_launch_that_failed_leaves_no_group(monkeypatch):
    def refuse(*_arguments: object) -> Iterator[RankProcess]:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(WorkerGroup, "_start_ranks", refuse)
    made = MultiprocExecutor(tiny_config("mp"))
    with pytest.raises(WorkerFailedError, match="could not be started: Resource temporarily"):
        made.start()
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = made.group
