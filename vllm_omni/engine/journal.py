"""The life of sessions in the log and in the figures: placed, made a chunk, stopped, ended."""

import logging
import time

from vllm_omni.diffusion.messages import WorkerReady
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.scheduler import Scheduler
from vllm_omni.engine.session import EndReason, EngineSession, StopCause
from vllm_omni.errors import OmniError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_OUR_FAULTS = {StopCause.STALLED, StopCause.FAULT}


class Journal:
    """Counts every session once, when its end is decided; writes two lines about it."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def group_ready(self, group: WorkerReady) -> None:
        """There is a new worker group."""
        self._metrics.max_sessions.set(group.sessions)
        self._metrics.kv_bytes.set(group.num_pages * group.page_bytes)

    def line_changed(self, scheduler: Scheduler) -> None:
        """Somebody came, moved up or went."""
        self._metrics.running.set(len(scheduler.placed))
        self._metrics.waiting.set(len(scheduler.waiting))
        self._metrics.kv_used_bytes.set(scheduler.held_bytes)

    def placed(self, session: EngineSession) -> None:
        """The session got its place on the workers."""
        waited_s = time.monotonic() - session.arrived_s
        self._metrics.queue_wait_s.observe(waited_s)
        request = session.request
        logger.info(
            "%s placed after %.2f s: %dx%d, %s chunks",
            *(session.label, waited_s, request.width, request.height),
            request.num_chunks or "endless",
        )

    def chunk_ready(self, session: EngineSession, ready_s: float) -> None:
        """A chunk is ready; the session does not count it yet.

        What the client delayed by not reading is no delay of the server's.
        """
        self._metrics.chunks.inc()
        if session.chunks_made == 0:
            self._metrics.ttfc_s.observe(ready_s - session.began_s)
        elif session.options.live:
            if session.resumed_s <= session.last_chunk_s:
                self._metrics.chunk_interval_s.observe(ready_s - session.last_chunk_s)
            if session.keeps_waiting(ready_s):
                self._metrics.deadline_misses.inc()

    def stopped(self, session: EngineSession, cause: StopCause) -> None:
        """The session is to end for this reason, whatever happens to it before it does."""
        session.stop_cause = cause
        self._metrics.stopped(cause)

    def ended(
        self,
        session: EngineSession,
        reason: EndReason,
        error: OmniError | None,
        *,
        peak_bytes: int,
    ) -> None:
        """The session has ended."""
        self._metrics.peak_memory(peak_bytes)
        lasted_s = time.monotonic() - session.arrived_s
        self._metrics.e2e_latency_s.observe(lasted_s)
        if session.stop_cause is None:
            self._metrics.ended(error)
        is_bad = error is not None or session.stop_cause in _OUR_FAULTS
        logger.log(
            logging.WARNING if is_bad else logging.INFO,
            "%s ended: %s, %d chunks in %.1f s%s",
            *(session.label, session.stop_cause or reason, session.chunks_total, lasted_s),
            "" if error is None else f": {error}",
        )
