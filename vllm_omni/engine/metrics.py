"""Counters and timings of the engine, in Prometheus' types; one registry per engine."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class EngineMetrics:
    """What ``/metrics`` shows. All names have the prefix ``vllm_omni:``."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.running = self._gauge("num_requests_running", "Sessions that hold a place")
        self.waiting = self._gauge("num_requests_waiting", "Sessions in line")
        self.kv_bytes = self._gauge("kv_pool_bytes", "Bytes of the KV pool on one rank")
        self.kv_used_bytes = self._gauge("kv_used_bytes", "KV bytes held by sessions on one rank")
        self.event_loop_lag_s = self._histogram(
            "event_loop_lag_s", "Lateness of a timer in the API process", _FINE_SECONDS
        )
        self.chunk_interval_s = self._histogram(
            "chunk_interval_s", "Time between two chunks of a session", _FINE_SECONDS
        )
        self.ttfc_s = self._histogram("ttfc_s", "Arrival of a session to its first chunk", _SECONDS)
        self.queue_wait_s = self._histogram(
            "request_queue_wait_s", "Arrival of a session to its place", _SECONDS
        )
        self.e2e_latency_s = self._histogram(
            "e2e_request_latency_s", "Arrival of a session to its end", _SECONDS
        )
        self.diffusion_forward_s = self._histogram(
            "diffusion_forward_s", "Four probes and the commit of a chunk", _FINE_SECONDS
        )
        self.vae_decode_s = self._histogram("vae_decode_s", "Decode of a chunk", _FINE_SECONDS)
        self.chunks = self._counter("chunks", "Chunks made")
        self.deadline_misses = self._counter(
            "deadline_misses", "Chunks that came later than playback needed them"
        )
        self.worker_restarts = self._counter("worker_restarts", "Restarts of the worker group")
        self._success = Counter(
            "vllm_omni:requests_success", "Sessions that ended well",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._failed = Counter(
            "vllm_omni:requests_failed", "Sessions that ended badly",
            ["model_name", "reason"], registry=self.registry,
        )  # fmt: skip

    def succeeded(self, reason: str) -> None:
        """Count a session that ended well."""
        self._success.labels(self._model, reason).inc()

    def failed(self, reason: str) -> None:
        """Count a session that ended badly."""
        self._failed.labels(self._model, reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm_omni:{name}", text, ["model_name"], registry=self.registry)
        return gauge.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm_omni:{name}", text, ["model_name"], registry=self.registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm_omni:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model)
