"""Runs every command on a group of worker processes, one per rank. Loads no torch here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic
from vllm_omni.diffusion.executor.conversation import RankConversation
from vllm_omni.diffusion.executor.worker_group import WorkerGroup, launch_failure
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    SessionRequest,
)
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.process import (
    CloseSession,
    Command,
    Done,
    Loading,
    OpenSession,
    Refused,
    Reply,
    Report,
    SharedChunk,
    WorkerMain,
)
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

ROOT = 0
_NO_SIZE = (0, 0)
"""Of a session that is not open: the workers refuse its chunk."""
SHORTEST_LIMIT_S = 60.0
SLOWEST_CHUNKS = 10
"""A chunk may take this many times as long as the slowest so far."""


class MultiprocExecutor:
    """One generation of worker processes behind pipes.

    Calls block; one call at a time, but for :meth:`shutdown`. Every error inside a worker that
    leaves the group usable comes back as the class it had there. After a
    :class:`WorkerFailedError` the processes are gone, and another executor has to be made.

    Args:
        worker_main: what a process runs.
    """

    def __init__(
        self, config: OmniDiffusionConfig, *, worker_main: WorkerMain = process.main
    ) -> None:
        self._config = config
        self._worker_main = worker_main
        self._group: RankConversation | None = None
        self._changing = threading.Lock()
        self._is_shut_down = False
        self._sizes: dict[str, tuple[int, int]] = {}
        self._limit = ChunkLimit(config.chunk_timeout_s, config.stage_init_timeout_s)

    @property
    def group(self) -> RankConversation:
        """The worker processes that run now.

        Raises:
            WorkerFailedError: if they were not started, were shut down, or were lost.
        """
        group = self._group
        if group is None:
            raise WorkerFailedError("the worker processes are not running")
        return group

    def start(self) -> GroupCapacity:
        """Start all ranks and wait until each has loaded the model."""
        started_s = time.monotonic()
        group = self._new_group()
        try:
            group.launch(self._worker_main)
            capacities = self._gather_capacities()
        except BaseException as error:
            self._drop()
            # Rank 1 may have said no and ended while rank 0 was still loading.
            if isinstance(error, WorkerFailedError) and group.refusal is not None:
                raise group.refusal from None
            raise
        logger.info(
            "%d worker processes ready in %.1f s", len(capacities), time.monotonic() - started_s
        )
        return min(capacities, key=lambda rank: rank.num_pages)

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        """Open a session on all ranks, or on none; one that is open begins anew."""
        self._command(OpenSession(session_id, request), f"opening session {session_id}")
        self._sizes[session_id] = (request.height, request.width)

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        """Make one chunk; ``deliver`` gets it before its KV commit, after which this returns."""
        doing = f"chunk {plan.chunk_index} of session {plan.session_id}"
        started_s = time.monotonic()
        size = self._sizes.get(plan.session_id, _NO_SIZE)
        deadline_s = started_s + self._limit.seconds(size)
        with self._conversation() as group:
            group.send(plan)
            first = group.receive(ROOT, deadline_s=deadline_s, doing=doing)
        if isinstance(first, SharedChunk):
            try:
                deliver(self._result(plan, first))
            except BaseException:
                self._gather(deadline_s, doing)
                self.close_session(plan.session_id)
                raise
            first = None
        timings = self._gather(deadline_s, doing, first)[ROOT].value
        self._limit.observe(size, time.monotonic() - started_s)
        assert isinstance(timings, ChunkTimings), "a worker answers a chunk with its timings"
        return timings

    def close_session(self, session_id: str) -> None:
        """Free a session on all ranks; one that is not open is no error."""
        self._sizes.pop(session_id, None)
        self._command(CloseSession(session_id), f"closing session {session_id}")

    def check_alive(self) -> None:
        """Look, without waiting, whether a rank has ended."""
        with self._conversation() as group:
            group.check_alive()

    def peak_bytes(self) -> int:
        """Return the peak memory of the rank that used most, in bytes."""
        replies = self._command(Report("peak"), "reporting its memory")
        return max(reply.value for reply in replies if isinstance(reply.value, int))

    def traffic(self) -> ExchangeTraffic:
        """Return what the root has exchanged with the ranks that share its tokens so far."""
        root = self._command(Report("traffic"), "reporting its exchanges")[ROOT].value
        assert isinstance(root, ExchangeTraffic), "a worker answers with what it counted"
        return root

    def shutdown(self) -> None:
        """End the processes for good, from any thread; a second call does nothing."""
        group = self._take_group(for_good=True)
        if group is not None:
            group.stop()

    def _make_group(self) -> RankConversation:
        return WorkerGroup(self._config)

    def _new_group(self) -> RankConversation:
        try:
            group = self._make_group()
        except OSError as error:
            raise launch_failure(error) from error
        with self._changing:
            self._group = group
        if self._is_shut_down:
            self._drop()
        return group

    @contextmanager
    def _conversation(self) -> Iterator[RankConversation]:
        """Give the running group; one that raises, or whose wait is interrupted, is lost."""
        group = self.group
        try:
            yield group
        except BaseException:
            self._drop()
            raise

    def _command(self, command: Command, doing: str) -> list[Done]:
        """Have every rank carry out a command; returns their replies, in the order of ranks."""
        with self._conversation() as group:
            group.send(command)
        return self._gather(time.monotonic() + self._config.stage_init_timeout_s, doing)

    def _gather_capacities(self) -> list[GroupCapacity]:
        """What every rank says of itself, or the first refusal: its peers may wait for it.

        All ranks are read as they speak, so that none waits with its weights for another to be
        heard. The time limit begins anew whenever any of them tells that weights arrive.
        """
        limit_s = self._config.stage_init_timeout_s
        deadline_s = time.monotonic() + limit_s
        pending = list(range(self.group.world_size))
        capacities = []
        while pending:
            with self._conversation() as group:
                rank, reply = group.receive_any(pending, deadline_s=deadline_s, doing="its start")
            match reply:
                case Loading():
                    deadline_s = time.monotonic() + limit_s
                case Done(GroupCapacity() as found):
                    capacities.append(found)
                    pending.remove(rank)
                case Refused() as refusal:
                    raise _shared_error([refusal])
        return capacities

    def _gather(self, deadline_s: float, doing: str, first: Reply | None = None) -> list[Done]:
        """The last reply of every rank, in the order of ranks.

        Args:
            first: the root's, where it was read already.

        Raises:
            OmniError: what the ranks refused with.
        """
        replies = [] if first is None else [first]
        with self._conversation() as group:
            replies += [
                group.receive(rank, deadline_s=deadline_s, doing=doing)
                for rank in range(len(replies), group.world_size)
            ]
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

    def _result(self, plan: ChunkPlan, chunk: SharedChunk) -> ChunkResult:
        # From here: the clock of another machine says nothing.
        ready_s = time.monotonic() - chunk.timings.encode_ms / 1000.0
        data = self.group.read_pixels(chunk.slot, chunk.shape, chunk.dtype)
        return ChunkResult(plan.session_id, plan.chunk_index, data, ready_s, chunk.timings)

    def _drop(self) -> None:
        """Kill what is left of a group that cannot be used any more."""
        group = self._take_group()
        if group is not None:
            group.kill()

    def _take_group(self, *, for_good: bool = False) -> RankConversation | None:
        with self._changing:
            self._is_shut_down = self._is_shut_down or for_good
            group, self._group = self._group, None
            return group


class ChunkLimit:
    """How long a chunk may take before its group counts as lost; each size is measured by itself.

    Args:
        fixed_s: the deployment's limit; ``None`` measures.
        cold_s: what the first two chunks of a size may take at least; the first may have to
            prepare kernels and counts for none.
    """

    def __init__(self, fixed_s: float | None, cold_s: float) -> None:
        self._fixed_s = fixed_s
        self._cold_s = cold_s
        self._slowest_s: dict[tuple[int, int], float] = {}

    def seconds(self, size: tuple[int, int]) -> float:
        """The limit of the next chunk of a session of this height and width, in seconds."""
        slowest_s = self._slowest_s.get(size)
        if self._fixed_s is not None:
            return self._fixed_s if slowest_s else max(self._fixed_s, self._cold_s)
        return max(SHORTEST_LIMIT_S, SLOWEST_CHUNKS * slowest_s if slowest_s else self._cold_s)

    def observe(self, size: tuple[int, int], chunk_s: float) -> None:
        """Count a finished chunk, but the first of its size: it is cold."""
        slowest_s = self._slowest_s.get(size)
        self._slowest_s[size] = 0.0 if slowest_s is None else max(slowest_s, chunk_s)


def _shared_error(refusals: list[Refused]) -> OmniError:
    """Return the reason of the rank that had one; the others only went along.

    Of several, the one that ends the whole group.
    """
    reasons = [refusal.error for refusal in refusals if refusal.error is not None]
    if not reasons:
        return WorkerFailedError("every rank says that another one refused")
    return next((reason for reason in reasons if isinstance(reason, WorkerFailedError)), reasons[0])
