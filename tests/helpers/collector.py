"""A collector of OpenTelemetry: takes spans by OTLP over HTTP and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What came.

    Attributes:
        url: what ``--otlp-traces-endpoint`` takes.
        services: names of the services that sent something.
    """

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        """Keep the spans of one message."""
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                pair.value.string_value
                for pair in one.resource.attributes
                if pair.key == "service.name"
            }
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    def named(self, name: str, parent: Span | None = None) -> list[Span]:
        """Spans of a name, by their beginning; of a parent only those directly inside it."""
        found = [
            span
            for span in self.spans
            if span.name == name and (parent is None or span.parent_span_id == parent.span_id)
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def text(span: Span, key: str) -> str:
    """A text among the attributes of a span."""
    return next(pair.value.string_value for pair in span.attributes if pair.key == key)


def seconds(span: Span) -> float:
    """How long a span lasted."""
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@contextmanager
def collector() -> Iterator[Collector]:
    """Collect until the block ends."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
