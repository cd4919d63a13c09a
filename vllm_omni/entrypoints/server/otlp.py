"""Sessions as OpenTelemetry spans, sent by OTLP over HTTP: session, its chunks, their parts."""

import time

from opentelemetry.context import Context, attach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from typing_extensions import override

from vllm_omni import __version__
from vllm_omni.diffusion.messages import ChunkResult
from vllm_omni.engine.session import ChunkReady, Opened, SessionEvent, WasReset
from vllm_omni.entrypoints.engine_client import stage_seconds
from vllm_omni.entrypoints.server.request_ids import current_request_id
from vllm_omni.entrypoints.server.tracing import SessionTrace, Traces
from vllm_omni.logger import adopt

_EXPORT_S = 2.0
"""How long one batch may take to the collector, retries included."""
_QUEUE = 2048
"""Spans that may wait. One batch takes all, so that a server's end waits for two at most."""
_SPAN_NAMES = {"probes": "denoise"}
"""Parts of a chunk that traces call as other engines do."""
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTraces(Traces):
    """Sends spans in batches, on a thread of its own.

    The SDK's variables of the environment apply, among them ``OTEL_SERVICE_NAME``,
    ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.
    """

    def __init__(self, endpoint: str) -> None:
        adopt("opentelemetry")
        named = Resource.create({SERVICE_NAME: "vllm-omni"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE, max_export_batch_size=_QUEUE)
        )
        self._tracer = self._provider.get_tracer("vllm_omni", __version__)

    @override
    def join(self, headers: Headers) -> None:
        attach(_PROPAGATOR.extract(headers, Context()))

    @override
    def session(self, session_id: str) -> SessionTrace:
        return _OtlpSession(self._tracer, session_id)

    @override
    def close(self) -> None:
        self._provider.shutdown()


class _OtlpSession(SessionTrace):
    """Spans of one session. Workers and server read one clock, ``time.monotonic``."""

    def __init__(self, tracer: Tracer, session_id: str) -> None:
        self._tracer = tracer
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._began_s = self._part_s = time.monotonic()
        self._span = tracer.start_span(
            "session",
            kind=SpanKind.SERVER,
            attributes={"gen_ai.request.id": current_request_id(), "session.id": session_id},
            start_time=self._ns(self._began_s),
        )
        self._inside = self._in_chunk = set_span_in_context(self._span)
        self._chunk: Span | None = None

    @override
    def __exit__(self, *raised: object) -> None:
        self._end_chunk()
        _, error, _ = raised
        if isinstance(error, Exception):
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()

    @override
    def took(self, event: SessionEvent) -> None:
        match event:
            case Opened(at_s):
                self._tell("queue", self._began_s, at_s, self._inside)
            case WasReset():
                self._span.add_event("reset")
            case ChunkReady(result):
                self._end_chunk()
                self._begin_chunk(result)

    @override
    def part(self, name: str, at_s: float) -> None:
        self._tell(name, self._part_s, at_s, self._in_chunk)
        self._part_s = at_s

    def _begin_chunk(self, result: ChunkResult) -> None:
        """Tell what the workers did: they say how long each part took, and when all was done."""
        parts_s = stage_seconds(result.timings)
        at_s = result.ready_s - sum(parts_s.values())
        self._chunk = self._tracer.start_span(
            "chunk",
            context=self._inside,
            attributes={"chunk.index": result.chunk_index},
            start_time=self._ns(at_s),
        )
        self._in_chunk = set_span_in_context(self._chunk)
        for name, took_s in parts_s.items():
            self._tell(_SPAN_NAMES.get(name, name), at_s, at_s + took_s, self._in_chunk)
            at_s += took_s
        self._part_s = result.ready_s

    def _end_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.end(self._ns(self._part_s))
            self._chunk = None

    def _tell(self, name: str, from_s: float, to_s: float, context: Context) -> None:
        self._tracer.start_span(name, context=context, start_time=self._ns(from_s)).end(
            self._ns(to_s)
        )

    def _ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970, as spans count."""
        return self._epoch_ns + round(monotonic_s * 1e9)
