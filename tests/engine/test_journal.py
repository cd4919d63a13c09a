"""Every session in the log and in the figures: once, by its true reason, with its client's id."""

import logging
import re
import time

import pytest
from prometheus_client import generate_latest

from tests.helpers.engine_bench import Bench, Reader, wait_until
from tests.helpers.fake_executor import FakeExecutor
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.engine.metrics import REFUSALS, EngineMetrics
from vllm_omni.engine.session import ChunkReady, Opened, SessionOptions, StopCause
from vllm_omni.errors import SessionFailedError, WorkerFailedError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]


@pytest.fixture
def bench():
    made = Bench(FakeExecutor(sessions=2))
    yield made
    made.engine.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="vllm_omni.engine")
    return caplog


def stopped(bench: Bench, cause: StopCause) -> Reader:
    """Stop a session in its life."""
    reader = bench.open(num_chunks=None)
    reader.until(ChunkReady)
    bench.engine.stop(reader.session_id, cause)
    reader.rest()
    return reader


class TestCounts:
    def test_a_finished_session(self, bench: Bench):
        reader = bench.open()
        reader.rest()
        bench.engine.stop(reader.session_id, StopCause.FAULT)
        assert bench.counted() == {"finished": 1}

    @pytest.mark.parametrize(
        ("cause", "reason"),
        [
            (StopCause.ASKED, "stopped"),
            (StopCause.ABORTED, "client_abort"),
            (StopCause.DISCONNECTED, "client_disconnect"),
            (StopCause.STALLED, "stage_error"),
            (StopCause.FAULT, "unknown"),
        ],
    )
    def test_a_stopped_session_by_its_cause(self, bench: Bench, cause: StopCause, reason: str):
        stopped(bench, cause)
        assert bench.counted() == {reason: 1}

    def test_of_two_causes_the_first_counts(self, bench: Bench):
        bench.executors[0].gate.clear()
        reader = bench.open(num_chunks=None)
        bench.engine.stop(reader.session_id, StopCause.ASKED)
        bench.engine.stop(reader.session_id)
        assert bench.counted() == {"stopped": 1}
        bench.executors[0].gate.set()
        reader.rest()
        assert bench.counted() == {"stopped": 1}

    def test_a_failed_chunk(self, bench: Bench):
        bench.executors[0].failures[0, 1] = SessionFailedError("a chunk raised")
        bench.open().rest()
        assert bench.counted() == {"stage_error": 1}

    def test_a_lost_group(self):
        bench = Bench(FakeExecutor(), FakeExecutor())
        bench.executors[0].failures[0, 0] = WorkerFailedError("rank 0 died")
        bench.open().rest()
        assert bench.counted() == {"stage_error": 1}
        bench.engine.close()

    def test_a_server_that_shuts_down(self, bench: Bench):
        reader = bench.open(num_chunks=None)
        reader.until(ChunkReady)
        bench.engine.drain()
        reader.rest()
        assert bench.counted() == {"unknown": 1}

    def test_every_reason_is_there_before_it_happens(self):
        metrics = EngineMetrics("m")
        text = generate_latest(metrics.registry).decode()
        found = set(re.findall(r'requests_(\w+)_total{[^}]*reason="(\w+)"[^}]*} 0.0', text))
        assert found == {
            ("success", "finished"), ("success", "stopped"),
            ("failed", "client_abort"), ("failed", "client_disconnect"),
            ("failed", "stage_error"), ("failed", "unknown"),
            *(("refused", reason) for reason in REFUSALS),
        }  # fmt: skip

    def test_the_attention_kernel_is_that_of_the_newest_workers(self):
        metrics = EngineMetrics("m")
        for kernel in ("flash", "cudnn"):
            metrics.group_ready(0, GroupCapacity(1, 1, 1, 1, 1, attention_kernel=kernel))
        text = generate_latest(metrics.registry).decode()
        shown = re.findall(r'attention_kernel{[^}]*kernel="(\w+)"[^}]*} (\S+)', text)
        assert shown == [("cudnn", "1.0")]


class TestLog:
    def test_two_lines_with_the_id_of_the_client_and_that_of_the_workers(self, bench: Bench, log):
        reader = bench.open(request_id="video_stream-1")
        reader.rest()
        label = rf"video_stream-1 \(session {reader.session_id}\)"
        placed, ended = log.records
        assert re.fullmatch(label + r" placed after \d+\.\d\d s: 96x64, 3 chunks", placed.message)
        assert re.fullmatch(label + r" ended: finished, 3 chunks in \d+\.\d s", ended.message)
        assert {placed.levelname, ended.levelname} == {"INFO"}

    def test_chunks_of_all_worlds_count(self, bench: Bench, log):
        reader = bench.open(num_chunks=None)
        reader.until(ChunkReady)
        bench.engine.reset(reader.session_id, lambda request: request)
        while (chunk := reader.until(ChunkReady)).result.chunk_index:
            pass
        bench.engine.stop(reader.session_id, StopCause.ASKED)
        reader.rest()
        made = len(bench.executors[0].plans)
        assert f"ended: stopped, {made} chunks" in log.records[-1].message
        assert "endless chunks" in log.records[0].message
        assert chunk.result.chunk_index == 0

    def test_a_failure_is_a_warning_with_its_error(self, bench: Bench, log):
        bench.executors[0].failures[0, 1] = SessionFailedError("a chunk raised")
        bench.open(request_id="r").rest()
        assert log.records[-1].levelname == "WARNING"
        assert re.search(r"^r .* ended: failed, 1 chunks in .* s: a chunk raised$",
                         log.records[-1].message)  # fmt: skip

    @pytest.mark.parametrize(
        ("cause", "level"),
        [
            (StopCause.DISCONNECTED, "INFO"),
            (StopCause.STALLED, "WARNING"),
            (StopCause.FAULT, "WARNING"),
        ],
    )
    def test_a_stop_says_its_cause(self, bench: Bench, log, cause: StopCause, level: str):
        stopped(bench, cause)
        assert f"ended: {cause}, " in log.records[-1].message
        assert log.records[-1].levelname == level


class TestPace:
    def test_jobs_and_late_readers_miss_no_deadline(self, bench: Bench):
        bench.executors[0].chunk_s = 0.02
        bench.open(fps=1000.0).rest()
        assert bench.metric("deadline_misses_total") == 0
        assert bench.metric("chunk_interval_s_count") == 0

    def test_a_slow_server_does(self, bench: Bench):
        # A chunk plays 9 or 12 ms, and takes 20 ms at least.
        bench.executors[0].chunk_s = 0.02
        # No reader is so late that the session would pause for it.
        options = SessionOptions(live=True, max_undelivered=10)
        bench.open(fps=1000.0, options=options).rest()
        assert bench.metric("deadline_misses_total") == 2
        assert bench.metric("chunk_interval_s_count") == 2
        assert bench.metric("chunk_interval_s_sum") >= 0.04

    def test_a_client_that_does_not_read_is_nobodys_fault(self, bench: Bench):
        options = SessionOptions(live=True, max_undelivered=1)
        reader = bench.open(fps=1000.0, options=options, num_chunks=2)
        reader.until(Opened)
        wait_until(lambda: len(bench.executors[0].plans) == 1)
        threshold_s = 0.05  # Playback of the first chunk is over after 9 ms.
        wait_until(lambda: bench.executors[0].began_s[0] + threshold_s < time.monotonic())
        reader.rest()
        assert bench.metric("deadline_misses_total") == 0
        assert bench.metric("chunk_interval_s_count") == 0
