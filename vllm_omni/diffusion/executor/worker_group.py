"""The worker processes of one generation: started together, watched together, ended together."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.registry import model_of
from vllm_omni.diffusion.worker.process import Command, Lost, Refused, Reply, Stop, WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger, log_file, logs_json
from vllm_omni.system_errors import is_refusal, sentence

logger = get_logger(__name__)

WorkerMain = Callable[[WorkerTask, Connection, SharedBytes], None]
"""What a worker process runs."""

PRELOADED = (
    "vllm_omni.diffusion.worker.process",
    "vllm_omni.diffusion.worker.worker",
)
"""What the fork server loads besides the code of the model."""
_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_StartContext = ForkServerContext | SpawnContext
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OBITUARY_S = 0.5
"""How long the others may take to end after the first one has: their end is told too."""
_STOP_S = 10.0
"""How long a worker may take to end after it was told to."""


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection


_WORKER_NAME = "vllm-omni-worker-"
_IMPORTED_AGAIN = 78
"""Exit code of a worker whose import of the caller's script came to start workers of its own."""
_WITHOUT_GUARD = (
    "ended because it imports the script that started it, which starts workers again; put what "
    'the script does below `if __name__ == "__main__":`'
)


class WorkerGroup:
    """One process per rank, each with a pipe of its own, and the memory that the root fills.

    Nothing of an earlier generation is used again: pipes, shared memory and meeting place are
    new, so a killed process can have left nothing behind that matters. Waiting sleeps in the
    kernel until a worker speaks or ends.

    One thread converses with the ranks; any thread may end them, also under a conversation, which
    then raises :class:`WorkerFailedError`. What a conversation waits on is closed only after it.

    Attributes:
        rendezvous: directory where the ranks meet; ``None`` for a group of one.
        refusal: what a rank that ended had refused with, if nobody had read it before.
    """

    def __init__(self, config: OmniDiffusionConfig, worker_main: WorkerMain) -> None:
        self.world_size = config.parallel.world_size
        self._pixels = SharedBytes.create()
        self._config = config
        self.rendezvous = (
            tempfile.mkdtemp(prefix="vllm-omni-ranks-") if self.world_size > 1 else None
        )
        self.refusal: OmniError | None = None
        self._reasons: dict[int, str] = {}
        self._conversing, self._killing = threading.Lock(), threading.Lock()
        self._is_closed = False
        try:
            self._workers = self._launch(worker_main)
        except (OSError, RuntimeError, MemoryError, EOFError) as error:
            _end((), self.rendezvous)
            self._pixels.close()
            raise _launch_failure(error) from error
        # Before the interpreter would wait for its children, which ignore its signals.
        self._at_exit = weakref.finalize(self, _end, self._workers, self.rendezvous)

    def send(self, command: Command) -> None:
        """Give every rank a command.

        Raises:
            WorkerFailedError: if a rank has ended.
        """
        with self._conversation():
            for worker in self._workers:
                try:
                    worker.pipe.send(command)
                except OSError:
                    raise self._loss() from None

    def receive(self, rank: int, *, deadline_s: float, doing: str) -> Reply:
        """Wait for one rank's next reply, with an eye on all ranks.

        Args:
            deadline_s: of ``time.monotonic()``.
            doing: what the worker was asked for, for the error.

        Raises:
            WorkerFailedError: if a rank has ended or the deadline has passed.
        """
        return self.receive_any([rank], deadline_s=deadline_s, doing=doing)[1]

    def receive_any(
        self, ranks: Sequence[int], *, deadline_s: float, doing: str
    ) -> tuple[int, Reply]:
        """Wait for the next reply of any of some ranks, with an eye on all ranks.

        Args:
            ranks: whose replies are wanted, rising; of several that have spoken, the first is read.
            deadline_s: of ``time.monotonic()``.
            doing: what the workers were asked for, for the error.

        Returns:
            The rank that spoke, and what it said.

        Raises:
            WorkerFailedError: if a rank has ended or the deadline has passed.
        """
        with self._conversation():
            pipes = {rank: self._workers[rank].pipe for rank in ranks}
            watched = [*pipes.values(), *(worker.process.sentinel for worker in self._workers)]
            ready = wait(watched, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                noun, silent = "ranks" if len(ranks) > 1 else "rank", ", ".join(map(str, ranks))
                raise WorkerFailedError(
                    f"{noun} {silent} of {self.world_size} did not finish {doing} in time; raise "
                    "chunk_timeout_s or stage_init_timeout if the machine is that slow"
                )
            speaker = next((rank for rank, pipe in pipes.items() if pipe in ready), None)
            if speaker is None:
                raise self._loss()
            try:
                reply = pipes[speaker].recv()
            except (EOFError, OSError):
                raise self._loss() from None
            if isinstance(reply, Lost):
                self._reasons[speaker] = reply.reason
                raise self._loss()
            return speaker, reply

    def read_pixels(self, shape: tuple[int, ...], dtype: str) -> Shaped[np.ndarray, "..."]:
        """Return a copy of what the root has put into the memory.

        Raises:
            WorkerFailedError: if the group was ended.
        """
        with self._conversation():
            return self._pixels.read(shape, dtype)

    def check_alive(self) -> None:
        """Return at once if all ranks run.

        Raises:
            WorkerFailedError: if one has ended.
        """
        with self._conversation():
            if wait([worker.process.sentinel for worker in self._workers], 0):
                raise self._loss()

    def stop(self) -> None:
        """Let every rank end by itself, then :meth:`kill` what is left.

        A rank that another thread is talking to is not asked: it would not hear it in time.
        """
        if self._conversing.acquire(blocking=False):
            try:
                self._ask_to_stop()
            finally:
                self._conversing.release()
        self.kill()

    def kill(self) -> None:
        """End every rank at once and give back what the group held; a second call does nothing."""
        with self._killing:
            self._at_exit()
            # Killing the ranks wakes any thread blocked in `wait`; it releases the lock.
            with self._conversing:
                self._close()

    def _ask_to_stop(self) -> None:
        if self._is_closed:
            return
        for worker in self._workers:
            try:
                worker.pipe.send(Stop())
            except OSError:
                logger.warning("rank %d had ended before it was told to", worker.rank)
        deadline_s = time.monotonic() + _STOP_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._pixels.close()

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        with self._conversing:
            if self._is_closed:
                raise WorkerFailedError(f"the worker group of {self.world_size} was ended")
            yield

    def _launch(self, worker_main: WorkerMain) -> tuple[_Worker, ...]:
        if multiprocessing.current_process().name.startswith(_WORKER_NAME):
            os._exit(_IMPORTED_AGAIN)
        context = _start_context(self._config)
        # The resource tracker unblocks signals in the thread that starts it. Started now, it does
        # not do so below, where the fork server would then die of a Ctrl-C.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            with envs.exported(self._config.env):
                return tuple(
                    self._launch_rank(context, worker_main, rank) for rank in range(self.world_size)
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _launch_rank(self, context: _StartContext, worker_main: WorkerMain, rank: int) -> _Worker:
        ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
        task = WorkerTask(
            self._config, rank, self.rendezvous, logger.getEffectiveLevel(), log_file(), logs_json()
        )
        process = context.Process(
            target=worker_main,
            args=(task, theirs, self._pixels),
            name=f"{_WORKER_NAME}{rank}",
        )
        process.start()
        theirs.close()
        return _Worker(rank, process, ours)

    def _loss(self) -> WorkerFailedError:
        """Return the error that says how every rank fared that has ended or is about to."""
        deadline_s = time.monotonic() + _OBITUARY_S
        alive = {worker.process.sentinel for worker in self._workers}
        while alive and (left_s := deadline_s - time.monotonic()) > 0:
            alive -= set(wait(list(alive), left_s))
        fates = [fate for worker in self._workers if (fate := self._fate(worker)) is not None]
        return WorkerFailedError(
            f"the worker group of {self.world_size} is lost: {'; '.join(fates) or 'a pipe broke'}"
        )

    def _fate(self, worker: _Worker) -> str | None:
        reason = self._reason(worker)
        code = worker.process.exitcode
        if code is None:
            return None if reason is None else f"rank {worker.rank} raised {reason}"
        if code == _IMPORTED_AGAIN:
            return f"rank {worker.rank} {_WITHOUT_GUARD}"
        ended = f"rank {worker.rank} ended with exit code {code}{_signal_name(code)}"
        return ended if reason is None else f"{ended} after {reason}"

    def _reason(self, worker: _Worker) -> str | None:
        """Return why a worker ended, if it said so."""
        if worker.rank not in self._reasons:
            match _last_words(worker.pipe):
                case Lost(reason):
                    self._reasons[worker.rank] = reason
                case Refused(error) if error is not None and worker.process.exitcode is not None:
                    self.refusal = self.refusal or error
                    self._reasons[worker.rank] = f"{type(error).__name__}: {error}"
        return self._reasons.get(worker.rank)


def _launch_failure(error: Exception) -> WorkerFailedError:
    """Return the error of processes that the system did not let start."""
    if isinstance(error, EOFError):
        why = "the process that forks them ended, as it does where no process can be forked"
    elif is_refusal(error):
        why = sentence(error)
    else:
        why = f"{type(error).__name__}: {error}"
    return WorkerFailedError(f"the worker processes could not be started: {why}")


def _end(workers: tuple[_Worker, ...], rendezvous: str | None) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
    if rendezvous is not None:
        shutil.rmtree(rendezvous, ignore_errors=True)


def _last_words(pipe: Connection) -> Lost | Refused | None:
    """Return what a worker said of its end, if nobody has read it."""
    try:
        while pipe.poll(0):
            reply = pipe.recv()
            if isinstance(reply, Lost | Refused):
                return reply
    except (EOFError, OSError):
        pass
    return None


def _signal_name(exit_code: int) -> str:
    if exit_code >= 0:
        return ""
    name = signal.Signals(-exit_code).name
    hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
    return f" ({name}){hint}"


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
