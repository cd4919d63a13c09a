"""Where the times of a session go beside metrics and log: nowhere, unless somebody collects traces.

What costs nothing is here; what sends spans is in :mod:`vllm_omni.entrypoints.server.otlp`.
"""

from contextlib import AbstractContextManager
from importlib import import_module

from starlette.datastructures import Headers

from vllm_omni.config.server import ServerConfig
from vllm_omni.engine.session import SessionEvent
from vllm_omni.errors import ConfigError

_OTLP_MODULE = "vllm_omni.entrypoints.server.otlp"


class SessionTrace(AbstractContextManager["SessionTrace"]):
    """Follows one session, from its place in line to the end of the block; this one forgets all."""

    def __exit__(self, *raised: object) -> None:
        """The session is over, by an error or not."""

    def took(self, event: SessionEvent) -> None:
        """The engine said something; a chunk begins what :meth:`part` goes on with."""

    def part(self, name: str, at_s: float) -> None:
        """A part of the latest chunk ended at ``at_s`` of ``time.monotonic()``.

        It began with the end of the part before, the first one when the pixels were there.
        """


class Traces:
    """Makes the traces of a server's sessions; these go nowhere."""

    def join(self, headers: Headers) -> None:
        """Put what the current request does into the trace that its client names, if it does."""

    def session(self, session_id: str) -> SessionTrace:
        """Begin the trace of a session that stands in line from now on."""
        del session_id
        return NO_TRACE

    def close(self) -> None:
        """Send what is not sent yet; takes a few seconds at most."""


NO_TRACE = SessionTrace()
NO_TRACES = Traces()


def traces_of(server: ServerConfig) -> Traces:
    """What the server's settings ask for.

    Raises:
        ConfigError: if the libraries for it are not installed.
    """
    if server.otlp_traces_endpoint is None:
        return NO_TRACES
    try:
        otlp = import_module(_OTLP_MODULE)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the extra otel ({error}): "
            "pip install opentelemetry-exporter-otlp-proto-http"
        ) from None
    return otlp.OtlpTraces(server.otlp_traces_endpoint)
