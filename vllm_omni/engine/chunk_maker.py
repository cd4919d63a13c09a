"""What the workers do for one session between two chunk boundaries: its next chunk, or a reset."""

from __future__ import annotations

import threading
import time

from vllm_omni.diffusion.messages import ChunkResult
from vllm_omni.engine.interactions import ChunkReceipt
from vllm_omni.engine.journal import Journal
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import ChunkReady, EngineSession, WasReset
from vllm_omni.engine.supervisor import WorkerSupervisor


class ChunkMaker:
    """Used by the engine's thread.

    Args:
        lock: guards what the client's side changes of a session.
    """

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        metrics: EngineMetrics,
        journal: Journal,
        *,
        lock: threading.Condition,
    ) -> None:
        self._supervisor = supervisor
        self._metrics = metrics
        self._journal = journal
        self._lock = lock

    def advance(self, session: EngineSession) -> None:
        """Make one chunk, or restart the session if it was asked to.

        Raises:
            WorkerFailedError: if the worker group is lost.
            OmniError: if the session is.
        """
        make = self._restart if session.resets else self._run_chunk
        make(session)

    def _restart(self, session: EngineSession) -> None:
        with self._lock:
            request = session.request_after_resets()
        self._supervisor.executor.close_session(session.session_id)
        self._supervisor.executor.open_session(session.session_id, request)
        session.restart(request, time.monotonic())
        session.emit(WasReset())

    def _run_chunk(self, session: EngineSession) -> None:
        now = time.monotonic()
        plan, receipt = session.interactions.plan(session.session_id, session.chunks_made, now)
        timings = self._supervisor.executor.run_chunk(
            plan, lambda result: self._hand_out(session, result, receipt)
        )
        self._metrics.chunk_timed(timings)

    def _hand_out(self, session: EngineSession, result: ChunkResult, receipt: ChunkReceipt) -> None:
        with self._lock:
            self._journal.chunk_ready(session, result.ready_s)
            session.chunk_made(result.ready_s)
        session.emit(ChunkReady(result, receipt, last=session.finished))
