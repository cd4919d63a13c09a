"""A worker process: obeys its executor's commands until it is told to stop or left alone.

The module loads no torch by itself, so that the environment of the deployment is in place before
torch looks at it. A signal never ends a worker: Ctrl-C and a service manager's SIGTERM reach the
whole process group, but only the executor knows when a chunk is finished. A worker whose executor
is gone finds its pipe closed and ends.
"""

from __future__ import annotations

import shutil
import signal
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, assert_never

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic
from vllm_omni.diffusion.messages import ChunkResult, ChunkTimings
from vllm_omni.diffusion.worker.commands import (
    ChunkReady,
    CloseSession,
    Command,
    Done,
    Lost,
    OpenSession,
    Refused,
    Reply,
    ReportPeak,
    ReportTraffic,
    RunChunk,
    Stop,
    WorkerTask,
)
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.errors import OmniError
from vllm_omni.logger import configure_logging, get_logger

if TYPE_CHECKING:
    from vllm_omni.diffusion.distributed.parallel_state import ParallelState
    from vllm_omni.diffusion.worker.worker import Worker

logger = get_logger(__name__)


def main(task: WorkerTask, pipe: Connection, pixels: SharedBytes) -> None:
    """Run one rank. The entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prepare_environment(task.config)
    configure_logging(
        level=task.log_level,
        rank=task.rank if task.config.parallel.world_size > 1 else None,
        file=task.log_file,
    )
    try:
        _serve(task, _Line(pipe), pixels)
    finally:
        # The executor does the same; this is for the case that it was killed.
        if task.rendezvous is not None and task.rank == 0:
            shutil.rmtree(task.rendezvous, ignore_errors=True)


def _serve(task: WorkerTask, line: _Line, pixels: SharedBytes) -> None:
    try:
        worker = _load(task)
    except OmniError as error:
        line.send(Refused(error))
        return
    line.send(Done(worker.ready))
    _WorkerLoop(worker, line, pixels).run()
    _end(worker)


def prepare_environment(config: OmniDiffusionConfig) -> None:
    """Set the variables of the deployment, of its devices and of its ranks in this process."""
    envs.export(dict(config.env))
    if config.devices is not None:
        envs.show_devices(config.device, config.devices)
    if config.parallel.world_size > 1:
        envs.prefer_loopback()


def _load(task: WorkerTask) -> Worker:
    import torch

    from vllm_omni.diffusion.worker.worker import Worker

    config = task.config
    torch.set_num_threads(max(1, torch.get_num_threads() // config.parallel.world_size))
    return Worker(config, local_rank=task.rank, parallel=_join(task))


def _join(task: WorkerTask) -> ParallelState | None:
    """Meet the other ranks, unless this one is alone, and see that exchanges between them work."""
    import torch

    from vllm_omni.diffusion.distributed.comm import UlyssesExchange, check_exchange
    from vllm_omni.diffusion.distributed.parallel_state import WorldPlace, join_world
    from vllm_omni.platforms import create_platform

    config = task.config
    if task.rendezvous is None:
        return None
    platform = create_platform(config.device)
    device = platform.device(task.rank)
    state = join_world(
        WorldPlace(
            rank=task.rank,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            sequence_parallel_size=config.parallel.ulysses_degree,
            rendezvous=task.rendezvous,
            backend=platform.collective_backend,
            device=device,
            timeout_s=config.chunk_timeout_s or config.stage_init_timeout_s,
        )
    )
    check_exchange(UlyssesExchange(state.sequence), dtype=torch.bfloat16, device=device)
    return state


def _end(worker: Worker) -> None:
    from vllm_omni.diffusion.distributed.parallel_state import leave_world

    worker.shutdown()
    leave_world()


class _Line:
    """The pipe to the executor; a broken one ends the process."""

    def __init__(self, pipe: Connection) -> None:
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


class _WorkerLoop:
    """Commands in, replies out, one at a time."""

    def __init__(self, worker: Worker, line: _Line, pixels: SharedBytes) -> None:
        self._worker = worker
        self._line = line
        self._pixels = pixels

    def run(self) -> None:
        """Obey until told to stop."""
        while not isinstance(command := self._line.receive(), Stop):
            self._line.send(self._answer(command))

    def _answer(self, command: Command) -> Reply:
        from vllm_omni.diffusion.distributed.parallel_state import PeerRefusedError

        try:
            return Done(self._obey(command))
        except PeerRefusedError:
            return Refused(None)
        except OmniError as error:
            logger.warning("%s: %s", type(command).__name__, error)
            return Refused(error)

    def _obey(self, command: Command) -> ChunkTimings | ExchangeTraffic | int | None:
        match command:
            case OpenSession(session_id, request):
                return self._worker.open_session(session_id, request)
            case RunChunk():
                return self._run_chunk(command)
            case CloseSession(session_id):
                return self._worker.close_session(session_id)
            case ReportPeak():
                return self._worker.peak_bytes()
            case ReportTraffic():
                return self._worker.traffic
            case Stop():
                return None
            case _:
                assert_never(command)

    def _run_chunk(self, command: RunChunk) -> ChunkTimings:
        self._worker.accept(command.plan)
        try:
            return self._worker.run_chunk(command.plan, self._deliver)
        except OmniError as error:
            if self._worker.is_alone:
                raise
            # Peers may be inside an exchange that this rank will never join.
            logger.error("a chunk that all ranks had begun failed on this one: %s", error)  # noqa: TRY400
            self._line.send(Lost(f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from error

    def _deliver(self, result: ChunkResult) -> None:
        self._pixels.write(result.data)
        self._line.send(
            ChunkReady(
                session_id=result.session_id,
                chunk_index=result.chunk_index,
                dtype=result.data.dtype.str,
                shape=result.data.shape,
                ready_s=result.ready_s,
                timings=result.timings,
            )
        )
