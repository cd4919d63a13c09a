"""A worker process: what its executor and it say to each other, and how it obeys.

The module loads no torch by itself, so that the environment of the deployment is in place before
torch looks at it. A signal never ends a worker: Ctrl-C and a service manager's SIGTERM reach the
whole process group, but only the executor knows when a chunk is finished. A worker whose executor
is gone ends at once, whatever it is doing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import format_exception_only
from typing import TYPE_CHECKING, Literal, Protocol, assert_never, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import (
    ExchangeTraffic,
    ParallelState,
    PeerRefusedError,
    WorldPlace,
    join_world,
    leave_world,
)
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import apply_log_config, configure_logging, get_logger
from vllm_omni.system_errors import is_refusal, sentence

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.worker import Worker

logger = get_logger(__name__)


LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank on its machine.

    Attributes:
        device_index: which of the devices that the process sees is the rank's.
        num_neighbours: ranks of the group on this machine, this one included.
        interface: network interface by which the other ranks are reached; ``None`` leaves the
            choice to the libraries.
    """

    device_index: int = 0
    num_neighbours: int = 1
    interface: str | None = LOOPBACK


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker process is started with.

    Attributes:
        rank: index of the process in its group; 0 is the root.
        rendezvous: where the ranks of this generation find each other, ``tcp://HOST:PORT`` of a
            store or a directory that no earlier generation used; ``None`` for a group of one.
        log_level: of the process that starts it.
        log_file: that process's, to which the worker appends; ``None`` for none.
        logs_json: whether that process logs JSON.
    """

    config: OmniDiffusionConfig
    rank: int
    rendezvous: str | None
    log_level: int
    log_file: str | None
    logs_json: bool = False
    seat: Seat = Seat()


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The command to open a session, or to begin one that is open anew."""

    session_id: str
    request: SessionRequest


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The command to free a session."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """The command to say the peak of memory, or what ranks that share tokens have exchanged."""

    what: Literal["peak", "traffic"]


@dataclass(frozen=True, slots=True)
class Stop:
    """The command to free everything and end the process."""


Command = OpenSession | ChunkPlan | CloseSession | Report | Stop
"""A plan is the command to make its chunk."""


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """The reply that a chunk stands in the shared memory; its commit follows.

    Attributes:
        slot: where it stands there.
        dtype: as ``numpy.dtype.str``.
    """

    slot: int
    dtype: str
    shape: tuple[int, ...]
    timings: ChunkTimings


@dataclass(frozen=True, slots=True)
class Done:
    """The reply that the command was carried out."""

    value: GroupCapacity | ChunkTimings | ExchangeTraffic | int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The reply that the command was not carried out; the worker goes on.

    Attributes:
        error: ``None`` where another rank refused and this one went along.
    """

    error: OmniError | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The reply that a step which all ranks had begun raised on this one; the process ends.

    Attributes:
        reason: class and text of what was raised.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Loading:
    """The news of a worker that starts: weights are arriving. Its reply follows."""


Reply = SharedChunk | Done | Refused | Lost | Loading


@runtime_checkable
class ExecutorPipe(Protocol):
    """A worker's way to its executor, and back; a broken one raises ``OSError`` or ``EOFError``."""

    def send(self, reply: Reply, /) -> None:
        """Say something to the executor."""
        ...

    def recv(self) -> Command:
        """Wait for the next command."""
        ...


@runtime_checkable
class PixelMemory(Protocol):
    """Where the root puts the pixels of a chunk before it announces them."""

    def write(self, array: Shaped[np.ndarray, "..."]) -> int:
        """Take an array, and return the slot that it stands in."""
        ...


WorkerMain = Callable[[WorkerTask, ExecutorPipe, PixelMemory], None]
"""What carries out the commands of an executor for one rank."""


def run_process(
    worker_main: WorkerMain, task: WorkerTask, pipe: ExecutorPipe, pixels: PixelMemory
) -> None:
    """Run one rank in a process of its own; this is its entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_executor, args=(task,), daemon=True).start()
    worker_main(task, pipe, pixels)


def _end_with_executor(task: WorkerTask) -> None:
    """Wait until the executor's process is gone, and end this one: a peer may keep it waiting."""
    executor = multiprocessing.parent_process()
    assert executor is not None, "an executor starts workers"
    executor.join()
    if task.rendezvous is not None:
        shutil.rmtree(task.rendezvous, ignore_errors=True)
    os._exit(1)


def worker_class(config: OmniDiffusionConfig) -> type[Worker]:
    """Return the class of the workers; only one that makes video loads the encoder."""
    if config.encode_on == "worker":
        from vllm_omni.diffusion.worker.encoding import EncodingWorker

        return EncodingWorker
    from vllm_omni.diffusion.worker.worker import Worker

    return Worker


def main(task: WorkerTask, pipe: ExecutorPipe, pixels: PixelMemory) -> None:
    """Load the model of one rank and obey until told to stop."""
    _serve(task, _ExitingPipe(pipe), pixels)


def prepare_environment(config: OmniDiffusionConfig, interface: str | None = LOOPBACK) -> None:
    """Set the variables of the deployment, of its devices and of its ranks in this process.

    Args:
        interface: by which the ranks reach each other; ``None`` leaves that to the libraries.
    """
    envs.export(dict(config.env))
    if config.devices is not None:
        envs.show_devices(config.device, config.devices)
    if config.parallel.world_size > 1 and interface is not None:
        envs.prefer_interface(interface)


def _serve(task: WorkerTask, pipe: _ExitingPipe, pixels: PixelMemory) -> None:
    with _reporting(task.rank, pipe):
        prepare_environment(task.config, task.seat.interface)
        configure_logging(
            level=task.log_level,
            rank=task.rank if task.config.parallel.world_size > 1 else None,
            file=task.log_file,
            as_json=task.logs_json,
        )
        if (log_config_file := envs.log_config_file()) is not None:
            apply_log_config(log_config_file)
        worker = _load(task, pipe)
    pipe.send(Done(worker.capacity))
    commands = _Commands(worker, pipe, pixels)
    while not isinstance(command := pipe.receive(), Stop):
        pipe.send(commands.answer(command))
    worker.shutdown()
    leave_world()


@contextmanager
def _reporting(rank: int, pipe: _ExitingPipe) -> Iterator[None]:
    """Tell the executor why this rank does not start, whatever was raised, and end the process."""
    try:
        yield
    except OmniError as error:
        pipe.send(Refused(error))
        raise SystemExit(0) from error
    except Exception as error:
        what = "; ".join("".join(format_exception_only(error)).splitlines())
        if is_refusal(error):
            what = sentence(error)
        logger.debug("rank %d could not load the model", rank, exc_info=error)
        pipe.send(Refused(WorkerFailedError(f"rank {rank} could not load the model: {what}")))
        raise SystemExit(1) from error


def _load(task: WorkerTask, pipe: _ExitingPipe) -> Worker:
    import torch

    from vllm_omni.diffusion.models.loader import loading_told
    from vllm_omni.diffusion.worker.link import tell_slow_link

    torch.set_num_threads(max(1, torch.get_num_threads() // task.seat.num_neighbours))
    parallel = _join(task)
    with loading_told(lambda: pipe.send(Loading())):
        worker = worker_class(task.config)(
            task.config, local_rank=task.seat.device_index, parallel=parallel
        )
    if parallel is not None and task.seat.num_neighbours < task.config.parallel.world_size:
        tell_slow_link(task.config, worker.pool.spec, parallel, worker.device)
    return worker


def _join(task: WorkerTask) -> ParallelState | None:
    """Meet the other ranks, unless this one is alone, and see that exchanges between them work."""
    import torch

    from vllm_omni.diffusion.distributed.comm import UlyssesExchange, check_exchange
    from vllm_omni.platforms import create_platform

    config = task.config
    if task.rendezvous is None:
        return None
    platform = create_platform(config.device)
    device = platform.device(task.seat.device_index)
    state = join_world(
        WorldPlace(
            rank=task.rank,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            sequence_parallel_size=config.parallel.ulysses_degree,
            rendezvous=task.rendezvous,
            backend=platform.collective_backend,
            device=device,
            timeout_s=max(config.chunk_timeout_s or 0.0, config.stage_init_timeout_s),
        )
    )
    check_exchange(UlyssesExchange(state.sequence), dtype=torch.bfloat16, device=device)
    return state


class _ExitingPipe:
    """The pipe to the executor; a broken one ends the worker."""

    def __init__(self, pipe: ExecutorPipe) -> None:
        self._pipe = pipe

    def receive(self) -> Command:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise SystemExit(0) from None

    def send(self, reply: Reply) -> None:
        try:
            self._pipe.send(reply)
        except OSError:
            raise SystemExit(0) from None


class _Commands:
    """Carries out commands, one at a time."""

    def __init__(self, worker: Worker, pipe: _ExitingPipe, pixels: PixelMemory) -> None:
        self._worker = worker
        self._pipe = pipe
        self._pixels = pixels

    def answer(self, command: Command) -> Reply:
        """Carry out a command, and end the process if that leaves other ranks waiting."""
        from vllm_omni.diffusion.worker.worker import PeersLeftWaitingError

        try:
            return Done(self._obey(command))
        except PeerRefusedError:
            return Refused(None)
        except PeersLeftWaitingError as error:
            logger.error("a chunk that all ranks had begun failed on this one: %s", error)  # noqa: TRY400
            self._pipe.send(Lost(str(error)))
            raise SystemExit(1) from error
        except OmniError as error:
            logger.warning("%s: %s", type(command).__name__, error)
            return Refused(error)

    def _obey(self, command: Command) -> ChunkTimings | ExchangeTraffic | int | None:
        match command:
            case OpenSession(session_id, request):
                return self._worker.open_session(session_id, request)
            case ChunkPlan():
                return self._worker.run_chunk(command, self._deliver)
            case CloseSession(session_id):
                return self._worker.close_session(session_id)
            case Report("peak"):
                return self._worker.peak_bytes()
            case Report():
                return self._worker.pipeline.traffic
            case Stop():
                return None
            case _:
                assert_never(command)

    def _deliver(self, result: ChunkResult) -> None:
        slot = self._pixels.write(result.data)
        self._pipe.send(SharedChunk(slot, result.data.dtype.str, result.data.shape, result.timings))
