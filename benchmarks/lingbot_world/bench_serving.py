"""What serving costs beside the model, as JSON with a goal beside each figure.

    OMP_NUM_THREADS=1 python -m benchmarks.lingbot_world.bench_serving

Delivery is measured with workers that hand out 480x832 frames made before
(``serving_probe.py``); start and first chunk with the tiny checkpoint. All processes are real and
on this machine. Exit codes: 0 measured (whether or not goals are met), 1 something failed.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path

import psutil

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_omni.benchmarks.metrics import ChunkRecord, percentile
from vllm_omni.benchmarks.session import (
    BenchmarkError,
    SessionOptions,
    endpoint_url,
    run_session,
)
from vllm_omni.benchmarks.workload import load_workload

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "benchmarks" / "lingbot_world" / "configs" / "cpu_tiny.yaml"
SERVE = ("-c", "from vllm_omni.entrypoints.cli.main import main; raise SystemExit(main())", "serve")
START_LIMIT_S = 300.0
END_LIMIT_S = 60.0
SETTLE_CHUNKS = 2
"""First chunks of a session that steady figures leave out: the encoder and caches warm up."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value beside what it should be at most; ``None`` for no goal."""

    name: str
    value: float
    goal: float | None = None

    def as_json(self) -> dict[str, object]:
        """For the report."""
        met = None if self.goal is None else self.value <= self.goal
        return {"value": round(self.value, 3), "goal_at_most": self.goal, "met": met}


class Program:
    """A server process on a port of its own."""

    def __init__(self, arguments: Sequence[str], port: int) -> None:
        self.port = port
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    def wait_ready(self) -> float:
        """Seconds from its start until ``/health`` says 200.

        Raises:
            BenchmarkError: it ended, or takes too long.
        """
        while self._process.poll() is None:
            if self._health() == HTTPStatus.OK:
                return time.monotonic() - self._began_s
            if time.monotonic() - self._began_s > START_LIMIT_S:
                break
            time.sleep(0.05)
        raise BenchmarkError(f"the server was not ready: exit status {self._process.poll()}")

    def end(self) -> None:
        """Send SIGTERM and wait."""
        self._process.terminate()
        self._process.wait(END_LIMIT_S)

    def read(self, path: str) -> str:
        """Body of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def cpu_ms(self) -> tuple[float, float]:
        """Processor time of the server's own process so far, and that of its workers."""
        own = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
        own_ms, *others_ms = [(one.user + one.system) * 1000.0 for one in times]
        return own_ms, sum(others_ms)

    def _health(self) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    """Run a server until the block ends; the port is appended to its arguments."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    running = Program([*arguments, "--port", str(port)], port)
    try:
        yield running
    finally:
        running.end()


def play(port: int, *, chunks: int, height: int, width: int) -> tuple[ChunkRecord, ...]:
    """One session; what arrived when."""
    workload = load_workload(None, {"num_chunks": chunks, "height": height, "width": width})
    endpoint = endpoint_url(None, "127.0.0.1", port)
    return asyncio.run(run_session(endpoint, workload, SessionOptions())).chunks


def delivery(
    model: str, encode_on: str, *, chunks: int, height: int, width: int, chunk_ms: float
) -> list[Figure]:
    """Encoding and everything between a worker and the socket."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "clocks.json"
        probe = ("-m", "benchmarks.lingbot_world.serving_probe", model, "--output", str(output))
        with program(*probe, "--chunk-ms", str(chunk_ms), "--encode-on", encode_on) as server:
            server.wait_ready()
            before_ms = server.cpu_ms()
            play(server.port, chunks=chunks, height=height, width=width)
            used_ms = [now - then for now, then in zip(server.cpu_ms(), before_ms, strict=True)]
        clocks = json.loads(output.read_text())
    figures = [
        Figure(f"{who}_cpu_ms_per_chunk_encode_on_{encode_on}", used / chunks)
        for who, used in zip(("api", "worker"), used_ms, strict=True)
    ]
    return figures + (delivery_figures(clocks) if encode_on == "api" else [])


def delivery_figures(clocks: dict[str, list[float]]) -> list[Figure]:
    """Figures of the clocks that ``serving_probe.py`` writes."""
    steady = slice(SETTLE_CHUNKS, None)
    overhead_ms = [
        (sent - ready - encode) * 1000.0
        for ready, encode, sent in zip(
            clocks["ready_s"], clocks["encode_s"], clocks["sent_s"], strict=True
        )
    ][steady]
    begin_s, end_s = clocks["ready_s"][SETTLE_CHUNKS], clocks["sent_s"][-1]
    ticks = [tick for tick in clocks["ticks_s"] if begin_s <= tick <= end_s]
    gaps_ms = [(after - before) * 1000.0 for before, after in pairwise(ticks)]
    encode_ms = [value * 1000.0 for value in clocks["encode_cpu_s"][steady]]
    cpu = clocks["process_cpu_s"]
    total_ms = (cpu[-1] - cpu[SETTLE_CHUNKS - 1]) * 1000.0 / len(overhead_ms)
    return [
        Figure("ticker_gap_ms_median", statistics.median(gaps_ms)),
        Figure("ticker_gap_ms_p99", percentile(gaps_ms, 99), 10.0),
        Figure("ticker_gap_ms_max", max(gaps_ms)),
        Figure("engine_overhead_ms_median", statistics.median(overhead_ms), 1.5),
        Figure("engine_overhead_ms_p99", percentile(overhead_ms, 99), 5.0),
        Figure("encode_cpu_ms_per_chunk", statistics.fmean(encode_ms)),
        Figure("delivery_cpu_ms_per_chunk", total_ms - statistics.fmean(encode_ms)),
    ]


def first_chunk(model: str, *, sessions: int, chunks: int) -> list[Figure]:
    """Start, first chunk of a warm server and steady chunks, on the tiny checkpoint."""
    flags = (model, "--omni", "--deploy-config", str(DEPLOY), "--host", "127.0.0.1")
    with program(*SERVE, *flags, "--disable-uvicorn-access-log") as server:
        ready_s = server.wait_ready()
        steady = play(server.port, chunks=chunks, height=64, width=96)
        condition_before_s = _condition_s(server)
        first_ms = [
            play(server.port, chunks=1, height=64, width=96)[0].arrival_s * 1000.0
            for _ in range(sessions)
        ]
        condition_ms = (_condition_s(server) - condition_before_s) * 1000.0 / sessions
    intervals = [c.inter_arrival_ms for c in steady if c.inter_arrival_ms is not None]
    steady_ms = statistics.median(intervals[len(intervals) // 2 :])
    return [
        Figure("start_to_ready_s", ready_s, 8.0),
        Figure("ttfc_warm_ms_median", statistics.median(first_ms),
               round(1.2 * steady_ms + condition_ms, 3)),
        Figure("steady_chunk_ms_median", steady_ms),
        Figure("condition_of_first_chunk_ms_mean", condition_ms),
    ]  # fmt: skip


def _condition_s(server: Program) -> float:
    """Seconds spent on conditions so far."""
    for line in server.read("/metrics").splitlines():
        if line.startswith("vllm_omni:diffusion_preprocess_s_sum"):
            return float(line.rpartition(" ")[2])
    raise BenchmarkError("the server shows no diffusion_preprocess_s")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="tiny checkpoint (default: written for the run)")
    parser.add_argument("--chunks", type=int, default=64, help="chunks of the delivery session")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--chunk-ms", type=float, default=250.0, help="time between two chunks")
    parser.add_argument("--sessions", type=int, default=7, help="sessions of one chunk")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    if args.chunks <= SETTLE_CHUNKS + 1 or args.sessions < 1:
        parser.error(f"--chunks must be above {SETTLE_CHUNKS + 1}, --sessions at least 1")
    return args


def report(args: argparse.Namespace, model: str) -> dict[str, object]:
    """All figures of a run."""
    size = {"height": args.height, "width": args.width}
    figures = [
        figure
        for encode_on in ("api", "worker")
        for figure in delivery(model, encode_on, chunks=args.chunks, chunk_ms=args.chunk_ms, **size)
    ]
    figures += first_chunk(model, sessions=args.sessions, chunks=16)
    return {
        "benchmark": "lingbot_world_serving",
        "environment": _environment(),
        "delivery_size": f"{args.width}x{args.height}",
        "figures": {figure.name: figure.as_json() for figure in figures},
    }


def _environment() -> dict[str, object]:
    import torch  # after the measurements: it takes memory and starts threads

    from benchmarks.lingbot_world.bench_timing import environment

    return environment(torch.device("cpu"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or _written_checkpoint(Path(folder) / "tiny")
        try:
            found = report(args, model)
        except (BenchmarkError, OSError, subprocess.TimeoutExpired) as error:
            print(f"ERROR: {error}", file=sys.stderr)
            return 1
    text = json.dumps(found, indent=2)
    print(text)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n")
    return 0


def _written_checkpoint(folder: Path) -> str:
    from vllm_omni.tools.tiny_checkpoint import write_tiny_checkpoint

    return str(write_tiny_checkpoint(folder))


if __name__ == "__main__":
    sys.exit(main())
