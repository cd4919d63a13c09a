"""A group of ranks as processes of this machine: forked from one that has loaded torch, or new."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from typing_extensions import override

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.conversation import RankConversation
from vllm_omni.diffusion.registry import model_of
from vllm_omni.diffusion.worker.process import (
    Command,
    Reply,
    Seat,
    WorkerMain,
    WorkerTask,
    run_process,
)
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import WorkerFailedError
from vllm_omni.logger import get_logger, log_file, logs_json
from vllm_omni.own_folder import OwnFolder, remove_leftovers
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
_POLL_S = 0.02
_LAUNCH_S = 1.0
"""How long a launch that is not needed any more may take to end by itself."""
_LOOK_S = 1.0
"""Between two looks whether a rank stands still."""
_STANDSTILL_S = 5.0
"""How long a rank may be stopped by a signal, as the whole program is by Ctrl-Z."""
_MEETING_PLACE = "vllm-omni-ranks-"
_WITHOUT_GUARD = (
    "ended because it imports the script that started it, which starts workers again; put what "
    'the script does below `if __name__ == "__main__":`'
)


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


class WorkerGroup(RankConversation):
    """One process per rank, each with a pipe of its own, and the memory that the root fills.

    Pipes, memory and meeting place are new in each group.

    Attributes:
        rendezvous: directory where the ranks meet; ``None`` for a group of one.
    """

    def __init__(self, config: OmniDiffusionConfig) -> None:
        super().__init__(config.parallel.world_size)
        self._config = config
        self._pixels = SharedBytes.create()
        try:
            self._folder = _meeting_place() if self.world_size > 1 else None
        except OSError:
            self._pixels.close()
            raise
        self.rendezvous = None if self._folder is None else str(self._folder.path)
        self._stopped_s: dict[int, float] = {}
        self._is_launching = False
        self._workers: list[RankProcess] = []
        # Before the interpreter would wait for its children, which ignore its signals.
        self._at_exit = weakref.finalize(self, _end, self._workers, self._folder)

    @override
    def launch(self, worker_main: WorkerMain) -> None:
        refused: Exception | None = None
        self._is_launching = True
        try:
            with self._conversation():
                for worker in self._start_ranks(worker_main):
                    self._workers.append(worker)
                self._is_launched = True
        except (OSError, RuntimeError, MemoryError, EOFError) as error:
            refused = error
        finally:
            self._is_launching = False
        if refused is not None:
            self.kill()
            raise launch_failure(refused) from refused

    def _start_ranks(self, worker_main: WorkerMain) -> Iterator[RankProcess]:
        """Start a process per rank; each is yielded as soon as it runs."""
        if multiprocessing.current_process().name.startswith(_NAME):
            os._exit(IMPORTED_AGAIN)
        context = _start_context(self._config)
        # The resource tracker unblocks signals in the thread that starts it. Started now, it does
        # not do so below, where the fork server would then die of a Ctrl-C.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            with envs.exported(self._config.env):
                for rank in range(self.world_size):
                    task = WorkerTask(
                        self._config, rank, self.rendezvous, logger.getEffectiveLevel(),
                        log_file(), logs_json(), Seat(rank, num_neighbours=self.world_size),
                    )  # fmt: skip
                    yield _started(context, worker_main, task, self._pixels)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def check_alive(self) -> None:
        """Return at once if all ranks run.

        Raises:
            WorkerFailedError: if one has ended, or stands still.
        """
        super().check_alive()
        with self._conversation():
            self._check_moving()

    def _send(self, rank: int, command: Command) -> None:
        self._workers[rank].pipe.send(command)

    def _speaker(self, ranks: Sequence[int], deadline_s: float) -> int | None:
        pipes = {rank: self._workers[rank].pipe for rank in ranks}
        watched = [*pipes.values(), *(worker.process.sentinel for worker in self._workers)]
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = wait(watched, min(left_s, _LOOK_S))
            if ready:
                return next((rank for rank, pipe in pipes.items() if pipe in ready), None)
            if left_s <= _LOOK_S:
                raise TimeoutError
            self._check_moving()

    def _receive(self, rank: int) -> Reply:
        return self._workers[rank].pipe.recv()

    def _unread(self, rank: int) -> Iterator[Reply]:
        pipe = self._workers[rank].pipe
        with suppress(EOFError, OSError):
            while pipe.poll(0):
                yield pipe.recv()

    def _await_ends(self, *, deadline_s: float, enough: int) -> bool:
        alive = {worker.process.sentinel for worker in self._workers}
        while len(self._workers) - len(alive) < enough:
            ended = wait(list(alive), max(0.0, deadline_s - time.monotonic()))
            if not ended:
                return False
            alive -= set(ended)
        return True

    def _ending(self, rank: int) -> str | None:
        code = self._workers[rank].process.exitcode
        if code is None:
            return None
        if code == IMPORTED_AGAIN:
            return _WITHOUT_GUARD
        return f"ended with exit code {code}{_signal_name(code)}"

    @override
    def read_pixels(
        self, slot: int, shape: tuple[int, ...], dtype: str
    ) -> Shaped[np.ndarray, "..."]:
        with self._conversation():
            return self._pixels.read(slot, shape, dtype)

    def _kill_ranks(self) -> None:
        self._end_launch()
        self._at_exit()

    def _end_launch(self) -> None:
        """Wait until nothing is launched any more; a fork server that still loads takes long."""
        patience_s = time.monotonic() + _LAUNCH_S
        while self._is_launching:
            if time.monotonic() > patience_s:
                kill_fork_server()
            time.sleep(_POLL_S)

    def _close(self) -> None:
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._pixels.close()

    def _check_moving(self) -> None:
        """Raise WorkerFailedError if a signal has stopped a rank and none has let it go on."""
        now_s = time.monotonic()
        stopped = [worker.rank for worker in self._workers if worker.is_stopped()]
        self._stopped_s = {rank: self._stopped_s.get(rank, now_s) for rank in stopped}
        for rank, since_s in self._stopped_s.items():
            if now_s - since_s >= _STANDSTILL_S:
                raise WorkerFailedError(
                    f"the worker group of {self.world_size} is lost: rank {rank} has been stopped "
                    f"by a signal for {now_s - since_s:.0f} s"
                )


def _meeting_place() -> OwnFolder:
    root = Path(tempfile.gettempdir())
    remove_leftovers(_MEETING_PLACE, root)
    return OwnFolder(_MEETING_PLACE, root)


def _end(workers: Sequence[RankProcess], folder: OwnFolder | None) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.process.join()
    if folder is not None:
        folder.remove()


def _signal_name(exit_code: int) -> str:
    if exit_code >= 0:
        return ""
    name = signal.Signals(-exit_code).name
    hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
    return f" ({name}){hint}"


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
