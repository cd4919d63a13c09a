"""The worker processes of one generation: started together, watched together, ended together."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.launch import (
    IMPORTED_AGAIN,
    RankProcess,
    WorkerMain,
    kill_fork_server,
    launch_failure,
    start_ranks,
)
from vllm_omni.diffusion.worker.process import Command, Lost, Refused, Reply, Stop
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger
from vllm_omni.own_folder import OwnFolder, remove_leftovers

logger = get_logger(__name__)

_OBITUARY_S = 0.5
"""How long the others may take to end after the first one has: their end is told too."""
_STOP_S = 10.0
"""How long a worker may take to end after it was told to."""
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


class WorkerGroup:
    """One process per rank, each with a pipe of its own, and the memory that the root fills.

    There are no processes until :meth:`launch`.

    Nothing of an earlier generation is used again: pipes, shared memory and meeting place are
    new, so a killed process can have left nothing behind that matters. Waiting sleeps in the
    kernel until a worker speaks or ends.

    One thread converses with the ranks; any thread may end them, also under a conversation, which
    then raises :class:`WorkerFailedError`. What a conversation waits on is closed only after it.

    Attributes:
        rendezvous: directory where the ranks meet; ``None`` for a group of one.
        refusal: what a rank that ended had refused with, if nobody had read it before.
    """

    def __init__(self, config: OmniDiffusionConfig) -> None:
        self.world_size = config.parallel.world_size
        self._config = config
        self._pixels = SharedBytes.create()
        try:
            self._folder = _meeting_place() if self.world_size > 1 else None
        except OSError:
            self._pixels.close()
            raise
        self.rendezvous = None if self._folder is None else str(self._folder.path)
        self.refusal: OmniError | None = None
        self._reasons: dict[int, str] = {}
        self._stopped_s: dict[int, float] = {}
        self._conversing, self._killing = threading.Lock(), threading.Lock()
        self._is_launching = self._is_ended = False
        self._workers: list[RankProcess] = []
        # Before the interpreter would wait for its children, which ignore its signals.
        self._at_exit = weakref.finalize(self, _end, self._workers, self._folder)

    def launch(self, worker_main: WorkerMain) -> None:
        """Make the processes. Another thread may end the group meanwhile.

        Args:
            worker_main: what they run.

        Raises:
            WorkerFailedError: if the system refuses one, or the group was ended.
        """
        refused: Exception | None = None
        self._is_launching = True
        try:
            with self._conversation():
                for worker in start_ranks(self._config, worker_main, self._pixels, self.rendezvous):
                    self._workers.append(worker)
        except (OSError, RuntimeError, MemoryError, EOFError) as error:
            refused = error
        finally:
            self._is_launching = False
        if refused is not None:
            self.kill()
            raise launch_failure(refused) from refused

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
            ready = self._wait(list(pipes.values()), deadline_s)
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

    def read_pixels(
        self, slot: int, shape: tuple[int, ...], dtype: str
    ) -> Shaped[np.ndarray, "..."]:
        """Return what the root has put into the memory; it stays valid when the group ends.

        Raises:
            WorkerFailedError: if the group was ended.
        """
        with self._conversation():
            return self._pixels.read(slot, shape, dtype)

    def check_alive(self) -> None:
        """Return at once if all ranks run.

        Raises:
            WorkerFailedError: if one has ended, or stands still.
        """
        with self._conversation():
            if wait([worker.process.sentinel for worker in self._workers], 0):
                raise self._loss()
            self._check_moving()

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
            if self._is_ended:
                return
            self._is_ended = True
            self._end_launch()
            self._at_exit()
            # Killing the ranks wakes any thread blocked in `wait`; it releases the lock.
            with self._conversing:
                self._close()

    def _end_launch(self) -> None:
        """Wait until nothing is launched any more; a fork server that still loads takes long."""
        patience_s = time.monotonic() + _LAUNCH_S
        while self._is_launching:
            if time.monotonic() > patience_s:
                kill_fork_server()
            time.sleep(_POLL_S)

    def _ask_to_stop(self) -> None:
        if self._is_ended:
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
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._pixels.close()

    def _wait(self, pipes: list[Connection], deadline_s: float) -> Sequence[object]:
        """Return the pipes that can be read and the sentinels of ended ranks; none at the deadline.

        Raises:
            WorkerFailedError: if a rank stands still.
        """
        watched = [*pipes, *(worker.process.sentinel for worker in self._workers)]
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = wait(watched, min(left_s, _LOOK_S))
            if ready or left_s <= _LOOK_S:
                return ready
            self._check_moving()

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

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        with self._conversing:
            if self._is_ended:
                raise WorkerFailedError(f"the worker group of {self.world_size} was ended")
            yield

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

    def _fate(self, worker: RankProcess) -> str | None:
        reason = self._reason(worker)
        code = worker.process.exitcode
        if code is None:
            return None if reason is None else f"rank {worker.rank} raised {reason}"
        if code == IMPORTED_AGAIN:
            return f"rank {worker.rank} {_WITHOUT_GUARD}"
        ended = f"rank {worker.rank} ended with exit code {code}{_signal_name(code)}"
        return ended if reason is None else f"{ended} after {reason}"

    def _reason(self, worker: RankProcess) -> str | None:
        """Return why a worker ended, if it said so."""
        if worker.rank not in self._reasons:
            match _last_words(worker.pipe):
                case Lost(reason):
                    self._reasons[worker.rank] = reason
                case Refused(error) if error is not None and worker.process.exitcode is not None:
                    self.refusal = self.refusal or error
                    self._reasons[worker.rank] = f"{type(error).__name__}: {error}"
        return self._reasons.get(worker.rank)


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
