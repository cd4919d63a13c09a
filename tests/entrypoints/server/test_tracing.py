"""Sessions as spans: a real server, a real collector, the parents and the times of what it gets."""

import json
import subprocess
import sys

import httpx
import pytest

from tests.helpers.collector import Collector, collector, seconds, text
from tests.helpers.server import real_server
from tests.helpers.socket_client import socket_client, start_message
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server import tracing
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "mine"}
WORKERS = ("condition", "camera", "denoise", "decode")
ROUNDING_S = 1e-6
"""Spans count nanoseconds of a clock in float64 seconds."""


def check_session(kept: Collector, request_id: str, parts: tuple[str, ...]) -> None:
    (session,) = (
        one for one in kept.named("session") if text(one, "gen_ai.request.id") == request_id
    )
    assert len(text(session, "session.id")) == 32
    (queue,) = kept.named("queue", session)
    assert queue.start_time_unix_nano == session.start_time_unix_nano
    chunks = kept.named("chunk", session)
    assert [one.attributes[0].value.int_value for one in chunks] == [0, 1, 2]
    for chunk in chunks:
        inside = [*(kept.named(name, chunk) for name in parts)]
        assert [len(found) for found in inside] == [1] * len(parts)
        spans = [found[0] for found in inside]
        assert {one.trace_id for one in (*spans, queue, chunk)} == {session.trace_id}
        ends = [chunk.start_time_unix_nano]
        for span in spans:
            assert span.start_time_unix_nano >= ends[-1] - 1000
            ends.append(span.end_time_unix_nano)
        assert ends[-1] == chunk.end_time_unix_nano <= session.end_time_unix_nano
        assert queue.end_time_unix_nano <= chunk.start_time_unix_nano
        assert seconds(kept.named("denoise", chunk)[0]) > 0


@pytest.mark.timing
async def test_a_session_its_chunks_and_their_parts():
    form = {name: value for name, value in start_message().items() if name != "type"}
    with collector() as kept, real_server("--otlp-traces-endpoint", kept.url) as server:
        async with socket_client(server.url, additional_headers=NAMED) as client:
            await client.say(start_message())
            assert (await client.rest())["chunks"] == 3
        answer = httpx.post(
            f"{server.address}/v1/videos/sync", json=form, headers={"X-Request-Id": "b"}, timeout=60
        )
        assert answer.status_code == 200
        assert server.terminate() == 0  # It sends what is left.
        told = json.loads(answer.headers["X-Stage-Durations"])
        assert kept.services == {"vllm-omni"}
        check_session(kept, "mine", (*WORKERS, "encode", "deliver"))
        check_session(kept, "b", (*WORKERS, "encode"))
        live, video = kept.named("session")
        assert (live.trace_id.hex(), live.parent_span_id.hex()) == (TRACE, CALLER)
        assert video.parent_span_id == b""
        assert video.trace_id != live.trace_id
        for name, key in zip(WORKERS, ("condition", "camera", "probes", "decode"), strict=True):
            took = [
                seconds(one) for chunk in kept.named("chunk", video)
                for one in kept.named(name, chunk)
            ]  # fmt: skip
            assert sum(took) == pytest.approx(told[key], abs=3 * ROUNDING_S)


@pytest.mark.parametrize(
    "url", ["grpc://127.0.0.1:4317", "127.0.0.1:4317", "http://", "http:/v1", ""]
)
def test_endpoints_that_are_none(url):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: must be a URL of http"):
        ServerConfig(("world",), otlp_traces_endpoint=url)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, tracing._OTLP_MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    server = ServerConfig(("world",), otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint needs the extra otel .*pip"):
        tracing.traces_of(server)


def test_off_it_costs_nothing():
    # FastAPI loads the API package itself, which does nothing without an SDK.
    code = (
        "import sys, vllm_omni.entrypoints.server.app, vllm_omni.entrypoints.cli.serve;"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf');"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
    traces = tracing.traces_of(ServerConfig(("world",)))
    assert traces.session("one") is traces.session("another") is tracing.NO_TRACE
