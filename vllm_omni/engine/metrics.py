"""What happens to sessions, in Prometheus' figures and in the log; one registry per engine."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_omni.diffusion.messages import ChunkTimings, GroupCapacity
from vllm_omni.engine.session import EndReason, EngineSession, StopCause
from vllm_omni.errors import OmniError, OutOfKVMemoryError, SessionClosedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

Metric = TypeVar("Metric", Gauge, Counter, Histogram)

_SECONDS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_PREFIX = "vllm_omni:"
_PROBES = 4
_MIB = 2**20
_STAGE_ERROR, _UNKNOWN = "stage_error", "unknown"
_FAILURES = {
    StopCause.ABORTED: "client_abort",
    StopCause.DISCONNECTED: "client_disconnect",
    StopCause.STALLED: _STAGE_ERROR,
    StopCause.FAULT: _UNKNOWN,
}
_OUR_FAULTS = {StopCause.STALLED, StopCause.FAULT}
OUT_OF_MEMORY = "out_of_memory"
REFUSALS = ("invalid_request", "server_full", OUT_OF_MEMORY, "unavailable")
"""Why a request did not become a session."""
_GAUGES = {
    "num_requests_running": "Sessions that hold a place",
    "max_sessions": "Sessions that hold a place at most",
    "kv_pool_bytes": "Bytes of the KV pool on one rank",
    "kv_used_bytes": "KV bytes held by sessions on one rank",
    "quarantined_failures": "Failures whose memory is kept until the process ends",
}
_OF_CHUNK = {
    "diffusion_exec_s": "A chunk on the root rank, its commit until it is queued",
    "diffusion_preprocess_s": "Camera of a chunk, and the condition made in it",
    "diffusion_forward_s": "Four probes of a chunk, and its commit until it is queued",
    "denoise_step_latency_s": "One probe, the mean over a chunk's",
    "vae_decode_s": "Decode of a chunk",
}
_COUNTERS = {
    "chunks": "Chunks made",
    "deadline_misses": "Chunks of live sessions that playback had to wait for",
    "worker_restarts": "Restarts of the worker group",
}
"""What is shown of each replica by itself: gauges, durations of a chunk, counters."""


class EngineMetrics:
    """The figures of one engine that ``/metrics`` shows; all names begin with ``vllm_omni:``.

    Args:
        by_replica: whether figures of a worker group carry the number of its replica as a label.
    """

    def __init__(self, model_name: str, *, by_replica: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._is_by_replica = by_replica
        self._waiting = self._one(Gauge, "num_requests_waiting", "Sessions in line")
        self.event_loop_lag_s = self._one(
            Histogram, "event_loop_lag_s", "Lateness of a timer in the API process",
            buckets=_FINE_SECONDS,
        )  # fmt: skip
        self.chunk_interval_s = self._one(
            Histogram,
            "chunk_interval_s",
            "Time between two chunks of a live session that did not pause for its client; a chunk "
            "plays 0.75 s at 16 fps, 0.5 s at 24",
            buckets=_FINE_SECONDS,
        )
        self.ttfc_s, self.queue_wait_s, self.e2e_latency_s = (
            self._one(Histogram, name, text, buckets=_SECONDS)
            for name, text in {
                "ttfc_s": "Arrival or reset of a session to its first chunk",
                "request_queue_wait_s": "Arrival of a session to its place",
                "e2e_request_latency_s": "Arrival of a session to its end",
            }.items()
        )
        self._kernel = self._by(Gauge, ["kernel"], "attention_kernel", "1 for the kernel in use")
        self._success = self._by(
            Counter, ["finished_reason"], "requests_success", "Sessions that ended well"
        )
        self._failed = self._by(Counter, ["reason"], "requests_failed", "Sessions that ended badly")
        self._refused = self._by(
            Counter, ["reason"], "requests_refused", "Requests that did not become sessions"
        )
        for counter, values in (
            (self._success, (EndReason.FINISHED, EndReason.STOPPED)),
            (self._failed, _FAILURES.values()),
            (self._refused, REFUSALS),
        ):
            for value in values:  # A rate needs a zero to start from.
                counter.labels(model_name, value)
        replica = ["replica"] if by_replica else []
        self._gauges = {
            name: self._by(Gauge, replica, name, text) for name, text in _GAUGES.items()
        }
        self._of_chunk = {
            name: self._by(Histogram, replica, name, text, buckets=_FINE_SECONDS)
            for name, text in _OF_CHUNK.items()
        }
        self._counters = {
            name: self._by(Counter, replica, name, text) for name, text in _COUNTERS.items()
        }
        self._peak_mb = self._by(
            Gauge, [*replica, "stage"], "peak_memory_mb",
            "Peak memory of the rank that used most, in MiB",
        )  # fmt: skip
        self.replica_added(0)

    def replica_added(self, replica: int) -> None:
        """Show a replica with zeros: a rate needs one to start from."""
        for metric in (*self._gauges.values(), *self._counters.values(), *self._of_chunk.values()):
            metric.labels(*self._of(replica))

    def replica_removed(self, replica: int) -> None:
        """Leave a replica out of what is measured now; what was counted stays."""
        for gauge in self._gauges.values():
            gauge.remove(*self._of(replica))

    def group_ready(self, replica: int, group: GroupCapacity) -> None:
        """Show the capacity of a new worker group."""
        self._show(replica, "max_sessions", group.sessions)
        self._show(replica, "kv_pool_bytes", group.num_pages * group.page_bytes)
        self._show(replica, "quarantined_failures", group.quarantined)
        self._kernel.clear()
        self._kernel.labels(self._model, group.attention_kernel).set(1)

    def group_lost(self, replica: int, *, for_good: bool = False) -> None:
        """Count a worker group that was lost; one that is lost for good has no places left."""
        if for_good:
            self._show(replica, "max_sessions", 0)
        else:
            self._count(replica, "worker_restarts")

    def line_changed(self, waiting: int) -> None:
        """Show how many sessions wait."""
        self._waiting.set(waiting)

    def places_changed(self, replica: int, *, placed: int, held_bytes: int) -> None:
        """Show how many sessions hold places on a replica, and their KV bytes on one rank."""
        self._show(replica, "num_requests_running", placed)
        self._show(replica, "kv_used_bytes", held_bytes)

    def opened(self, session: EngineSession, now_s: float) -> None:
        """Log a session that got its place on the workers, and count how long it waited."""
        waited_s = now_s - session.arrived_s
        self.queue_wait_s.observe(waited_s)
        request = session.request
        logger.info(
            "%s placed after %.2f s: %dx%d, %s chunks",
            *(session.label, waited_s, request.width, request.height),
            request.num_chunks or "endless",
        )

    def chunk_ready(self, session: EngineSession, ready_s: float) -> None:
        """Count a chunk that is ready; the session does not count it yet.

        What the client delayed by not reading is no delay of the server's.
        """
        self._count(session.replica, "chunks")
        if session.chunks_made == 0:
            self.ttfc_s.observe(ready_s - session.began_s)
        elif session.options.live:
            if session.resumed_s <= session.last_chunk_s:
                self.chunk_interval_s.observe(ready_s - session.last_chunk_s)
            if session.keeps_waiting(ready_s):
                self._count(session.replica, "deadline_misses")

    def stopped(self, cause: StopCause) -> None:
        """Count a session that is stopped before its end."""
        if cause is StopCause.ASKED:
            self._success.labels(self._model, EndReason.STOPPED).inc()
        else:
            self._failed.labels(self._model, _FAILURES[cause]).inc()

    def ended(
        self, session: EngineSession, reason: EndReason, error: OmniError | None, peak_bytes: int
    ) -> None:
        """Log a session that has ended, and count it unless it was counted when it was stopped.

        Args:
            peak_bytes: peak memory of the rank that used most; 0 says nothing.
        """
        lasted_s = time.monotonic() - session.arrived_s
        self.e2e_latency_s.observe(lasted_s)
        if peak_bytes:
            peak_mb = self._peak_mb.labels(*self._of(session.replica), "0")
            peak_mb.set(peak_bytes / _MIB)
        if session.stop_cause is None:
            self._count_end(error)
        is_bad = error is not None or session.stop_cause in _OUR_FAULTS
        logger.log(
            logging.WARNING if is_bad else logging.INFO,
            "%s ended: %s, %d chunks in %.1f s%s",
            *(session.label, session.stop_cause or reason, session.chunks_total, lasted_s),
            "" if error is None else f": {error}",
        )

    def _count_end(self, error: OmniError | None) -> None:
        if error is None:
            self._success.labels(self._model, EndReason.FINISHED).inc()
        elif isinstance(error, OutOfKVMemoryError):
            # It never had a place: it came before the workers could say that none is large enough.
            self.refused(OUT_OF_MEMORY)
        else:
            # The server that shuts down is no fault of a stage.
            shut_down = isinstance(error, SessionClosedError)
            self._failed.labels(self._model, _UNKNOWN if shut_down else _STAGE_ERROR).inc()

    def refused(self, reason: str) -> None:
        """Count a request that did not become a session, for one of :data:`REFUSALS`."""
        self._refused.labels(self._model, reason).inc()

    def chunk_timed(self, replica: int, timings: ChunkTimings) -> None:
        """Take the durations of the parts of a chunk that a replica has made."""
        preprocess_ms = timings.condition_ms + timings.camera_ms
        forward_ms = timings.probes_ms + timings.commit_ms
        for name, value_ms in {
            "diffusion_exec_s": preprocess_ms + forward_ms + timings.decode_ms,
            "diffusion_preprocess_s": preprocess_ms,
            "diffusion_forward_s": forward_ms,
            "denoise_step_latency_s": timings.probes_ms / _PROBES,
            "vae_decode_s": timings.decode_ms,
        }.items():
            self._of_chunk[name].labels(*self._of(replica)).observe(value_ms / 1000.0)

    def _by(
        self,
        kind: Callable[..., Metric],
        labels: list[str],
        name: str,
        text: str,
        **options: object,
    ) -> Metric:
        """A figure by the model and by some more labels."""
        labels = ["model_name", *labels]
        return kind(f"{_PREFIX}{name}", text, labels, registry=self.registry, **options)

    def _one(self, kind: Callable[..., Metric], name: str, text: str, **options: object) -> Metric:
        return self._by(kind, [], name, text, **options).labels(self._model)

    def _of(self, replica: int) -> tuple[object, ...]:
        """Values of the labels of a replica's metrics."""
        return (self._model, replica) if self._is_by_replica else (self._model,)

    def _show(self, replica: int, name: str, value: int) -> None:
        self._gauges[name].labels(*self._of(replica)).set(value)

    def _count(self, replica: int, name: str) -> None:
        self._counters[name].labels(*self._of(replica)).inc()
