"""How the processes of ranks are made: forked from one that has loaded torch, or new."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.registry import model_of
from vllm_omni.diffusion.worker.process import Seat, WorkerMain, WorkerTask, run_process
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import WorkerFailedError
from vllm_omni.logger import get_logger, log_file, logs_json
from vllm_omni.system_errors import is_refusal, sentence

logger = get_logger(__name__)

PRELOADED = ("vllm_omni.diffusion.worker.process", "vllm_omni.diffusion.worker.worker")
"""What the fork server loads besides the code of the model."""
IMPORTED_AGAIN = 78
"""Exit code of a worker whose import of the caller's script came to start workers of its own."""
_WITHOUT_FORK_SERVER = 255
"""Exit code that multiprocessing gives a process, dead or alive, when its fork server is gone."""
_NAME = "vllm-omni-worker-"
_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_StartContext = ForkServerContext | SpawnContext
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank, and our end of the pipe to it."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def kill(self) -> None:
        """End it at once, also if the fork server, which alone would know its end, is gone."""
        pid = self.process.pid
        if self.process.exitcode == _WITHOUT_FORK_SERVER and pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()

    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped it and none has let it go on, as Linux says."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        # The name before it may hold anything, parentheses too.
        return status.rpartition(")")[2].split()[0] == "T"


def start_ranks(
    config: OmniDiffusionConfig,
    worker_main: WorkerMain,
    pixels: SharedBytes,
    rendezvous: str | None,
) -> Iterator[RankProcess]:
    """Start a process per rank; each is yielded as soon as it runs.

    Args:
        worker_main: what they run.
        pixels: what the root fills.
        rendezvous: directory where they meet; ``None`` for one rank.
    """
    if multiprocessing.current_process().name.startswith(_NAME):
        os._exit(IMPORTED_AGAIN)
    context = _start_context(config)
    # The resource tracker unblocks signals in the thread that starts it. Started now, it does
    # not do so below, where the fork server would then die of a Ctrl-C.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        with envs.exported(config.env):
            for rank in range(config.parallel.world_size):
                task = WorkerTask(
                    config, rank, rendezvous, logger.getEffectiveLevel(), log_file(), logs_json(),
                    Seat(device_index=rank, num_neighbours=config.parallel.world_size),
                )  # fmt: skip
                yield _started(context, worker_main, task, pixels)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(
    context: _StartContext, worker_main: WorkerMain, task: WorkerTask, pixels: SharedBytes
) -> RankProcess:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    process = context.Process(
        target=run_process, args=(worker_main, task, theirs, pixels), name=f"{_NAME}{task.rank}"
    )
    process.start()
    theirs.close()
    return RankProcess(task.rank, process, ours)


def kill_fork_server() -> None:
    """End the fork server of this process, if there is one; the next launch makes another.

    It loads the model's code before it listens to anybody, and only a signal ends it then.
    """
    pid = forkserver._forkserver._forkserver_pid  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def launch_failure(error: Exception) -> WorkerFailedError:
    """Return the error of processes that the system did not let start."""
    if isinstance(error, EOFError):
        why = "the process that forks them ended, as it does where no process can be forked"
    elif is_refusal(error):
        why = sentence(error)
    else:
        why = f"{type(error).__name__}: {error}"
    return WorkerFailedError(f"the worker processes could not be started: {why}")


def _start_context(config: OmniDiffusionConfig) -> _StartContext:
    """Choose between a fork server that has loaded torch and the model's code, and new processes.

    Forks are quick, above all after a failure. They are of no use where the deployment sets
    environment variables that torch reads when it is loaded, and a process that has loaded the
    NPU's library must not fork.
    """
    if config.env or config.device == "npu":
        return multiprocessing.get_context("spawn")
    _shorten_socket_names()
    context = multiprocessing.get_context("forkserver")
    entry = model_of(Path(config.model), config.model_class_name)
    context.set_forkserver_preload([*PRELOADED, *entry.preload])
    return context


def _shorten_socket_names() -> None:
    """Let the fork server keep its sockets in a short folder where that of TMPDIR is too long."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + _SOCKET_NAME_BYTES <= _LONGEST_SOCKET_PATH:
        return
    short = next((one for one in _SHORT_FOLDERS if os.access(one, os.W_OK | os.X_OK)), usual)
    tempfile.tempdir = short
    try:
        # Made once, then used by all sockets of this process.
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
