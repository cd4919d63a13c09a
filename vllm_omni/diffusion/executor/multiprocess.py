"""Runs every command on a group of worker processes, one per rank. Loads no torch here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic
from vllm_omni.diffusion.executor.worker_group import WorkerGroup, WorkerMain
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.commands import (
    ChunkReady,
    CloseSession,
    Command,
    Done,
    OpenSession,
    Refused,
    Reply,
    ReportPeak,
    ReportTraffic,
    RunChunk,
)
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

ROOT = 0
SHORTEST_LIMIT_S = 60.0
SLOWEST_CHUNKS = 10
"""A chunk may take this many times as long as the slowest so far."""


class MultiprocExecutor:
    """Worker processes behind pipes. Calls block; one call at a time, but for :meth:`shutdown`.

    Every error inside a worker that leaves the group usable comes back as the class it had
    there. After a :class:`WorkerFailedError` the group is gone: the only useful call is
    :meth:`shutdown`, then :meth:`start` for a new generation or another executor.

    Args:
        worker_main: what a process runs.
    """

    def __init__(
        self, config: OmniDiffusionConfig, *, worker_main: WorkerMain = process.main
    ) -> None:
        self._config = config
        self._worker_main = worker_main
        self._group: WorkerGroup | None = None
        self._changing = threading.Lock()
        self._is_shut_down = False
        self._limit = ChunkLimit(config.chunk_timeout_s, config.stage_init_timeout_s)

    @property
    def group(self) -> WorkerGroup:
        """The running processes.

        Raises:
            WorkerFailedError: if they were not started, were shut down, or were lost.
        """
        group = self._group
        if group is None:
            raise WorkerFailedError("the worker processes are not running")
        return group

    def start(self) -> GroupCapacity:
        """Start all ranks and wait until each has loaded the model."""
        with self._changing:
            if self._group is not None:
                raise WorkerFailedError("the worker processes are already running")
            self._is_shut_down = False
        self._limit = ChunkLimit(self._config.chunk_timeout_s, self._config.stage_init_timeout_s)
        started_s = time.monotonic()
        group = self._launch()
        try:
            ready = self._gather_ready(started_s + self._config.stage_init_timeout_s)
        except BaseException as error:
            self._drop()
            # Rank 1 may have said no and ended while rank 0 was still loading.
            if isinstance(error, WorkerFailedError) and group.refusal is not None:
                raise group.refusal from None
            raise
        logger.info("%d worker processes ready in %.1f s", len(ready), time.monotonic() - started_s)
        return min(ready, key=lambda rank: rank.num_pages)

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none."""
        self._call(OpenSession(session_id, request), f"opening session {session_id}")

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk. ``deliver`` gets it before the KV commit; returns after the commit."""
        doing = f"chunk {plan.chunk_index} of session {plan.session_id}"
        started_s = time.monotonic()
        deadline_s = started_s + self._limit.seconds
        self._send(RunChunk(plan))
        first = self._receive(ROOT, deadline_s, doing)
        if isinstance(first, ChunkReady):
            try:
                deliver(self._result(first))
            except BaseException:
                self._gather(deadline_s, doing)
                self.close_session(plan.session_id)
                raise
            first = None
        timings = self._gather(deadline_s, doing, first)[ROOT].value
        self._limit.observe(time.monotonic() - started_s)
        assert isinstance(timings, ChunkTimings), "a worker answers a chunk with its timings"
        return timings

    def close_session(self, session_id: str) -> None:
        """Free a session on all ranks; one that is not open is no error."""
        self._call(CloseSession(session_id), f"closing session {session_id}")

    def check_alive(self) -> None:
        """Look, without waiting, whether a rank has ended."""
        try:
            self.group.check_alive()
        except WorkerFailedError:
            self._drop()
            raise

    def peak_bytes(self) -> int:
        """Peak memory of the rank that used most."""
        replies = self._call(ReportPeak(), "reporting its memory")
        return max(reply.value for reply in replies if isinstance(reply.value, int))

    def traffic(self) -> ExchangeTraffic:
        """What the root has exchanged with the ranks that share its tokens, since the start."""
        root = self._call(ReportTraffic(), "reporting its exchanges")[ROOT].value
        assert isinstance(root, ExchangeTraffic), "a worker answers with what it counted"
        return root

    def shutdown(self) -> None:
        """End the processes, from any thread; a second call does nothing.

        While they are being launched there is nothing to end: :meth:`start` does it then.
        """
        group = self._take_group(for_good=True)
        if group is not None:
            group.stop()

    def _launch(self) -> WorkerGroup:
        group = WorkerGroup(self._config, self._worker_main)
        with self._changing:
            if not self._is_shut_down:
                self._group = group
                return group
        group.kill()
        raise WorkerFailedError("the worker processes were shut down while they were launched")

    def _call(self, command: Command, doing: str) -> list[Done]:
        self._send(command)
        return self._gather(time.monotonic() + self._config.stage_init_timeout_s, doing)

    def _send(self, command: Command) -> None:
        try:
            self.group.send(command)
        except BaseException:
            self._drop()
            raise

    def _receive(self, rank: int, deadline_s: float, doing: str) -> Reply:
        try:
            return self.group.receive(rank, deadline_s=deadline_s, doing=doing)
        except BaseException:
            # An interrupted wait loses the place in the conversation as surely as a lost rank.
            self._drop()
            raise

    def _gather_ready(self, deadline_s: float) -> list[GroupCapacity]:
        """What every rank says of itself, or the first refusal: its peers may wait for it."""
        ready = []
        for rank in range(self.group.world_size):
            match self._receive(rank, deadline_s, "its start"):
                case Done(GroupCapacity() as found):
                    ready.append(found)
                case Refused() as refusal:
                    raise _shared_error([refusal])
        return ready

    def _gather(self, deadline_s: float, doing: str, first: Reply | None = None) -> list[Done]:
        """The last reply of every rank, in the order of ranks.

        Args:
            first: the root's, where it was read already.

        Raises:
            OmniError: what the ranks refused with.
        """
        replies = [] if first is None else [first]
        ranks = range(len(replies), self.group.world_size)
        replies.extend(self._receive(rank, deadline_s, doing) for rank in ranks)
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        if not refusals:
            return [reply for reply in replies if isinstance(reply, Done)]
        if len(refusals) < len(replies):
            self._drop()
            raise WorkerFailedError(f"the ranks disagree about {doing}: {_shared_error(refusals)}")
        error = _shared_error(refusals)
        if isinstance(error, WorkerFailedError):
            self._drop()
        raise error

    def _result(self, ready: ChunkReady) -> ChunkResult:
        return ChunkResult(
            session_id=ready.session_id,
            chunk_index=ready.chunk_index,
            data=self.group.read_pixels(ready.shape, ready.dtype),
            ready_s=ready.ready_s,
            timings=ready.timings,
        )

    def _drop(self) -> None:
        """Kill what is left of a group that cannot be used any more."""
        group = self._take_group()
        if group is not None:
            group.kill()

    def _take_group(self, *, for_good: bool = False) -> WorkerGroup | None:
        with self._changing:
            self._is_shut_down = self._is_shut_down or for_good
            group, self._group = self._group, None
            return group


class ChunkLimit:
    """How long a chunk may take before its group counts as lost.

    Args:
        fixed_s: the deployment's limit; ``None`` measures.
        cold_s: limit of the first two chunks; the first may have to compile and counts for none.
    """

    def __init__(self, fixed_s: float | None, cold_s: float) -> None:
        self._fixed_s = fixed_s
        self._cold_s = cold_s
        self._slowest_s: float | None = None

    @property
    def seconds(self) -> float:
        """Limit of the next chunk."""
        if self._fixed_s is not None:
            return self._fixed_s
        measured_s = SLOWEST_CHUNKS * self._slowest_s if self._slowest_s else self._cold_s
        return max(SHORTEST_LIMIT_S, measured_s)

    def observe(self, chunk_s: float) -> None:
        """Count a finished chunk, but the first: it is cold."""
        self._slowest_s = 0.0 if self._slowest_s is None else max(self._slowest_s, chunk_s)


def _shared_error(refusals: list[Refused]) -> OmniError:
    """The reason of the rank that had one; the others only went along.

    Of several, the one that ends the whole group.
    """
    reasons = [refusal.error for refusal in refusals if refusal.error is not None]
    if not reasons:
        return WorkerFailedError("every rank says that another one refused")
    return next((reason for reason in reasons if isinstance(reason, WorkerFailedError)), reasons[0])
