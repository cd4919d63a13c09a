"""Measure a running server as its viewers see it, over the WebSocket of live worlds.

Sessions run one after another, ``--concurrency`` of them at once, or start by ``--arrival-rate``.
Exit codes: 0 all sessions complete, 1 a session failed, 2 bad flags.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from vllm_omni.benchmarks import report
from vllm_omni.benchmarks.metrics import Basis, ChunkRecord, aggregate_metrics, compute_metrics
from vllm_omni.benchmarks.report import SessionResult
from vllm_omni.benchmarks.session import (
    BenchmarkError,
    SessionOptions,
    endpoint_url,
    run_session,
    served_size,
)
from vllm_omni.benchmarks.workload import (
    CAMERA_PATTERNS,
    DEFAULT_WARMUP_CHUNKS,
    Workload,
    load_workload,
)
from vllm_omni.entrypoints.command_parser import integer, number


def arrival_offsets(sessions: int, rate: float, *, process: str, seed: int) -> list[float]:
    """Seconds after which each session starts: the first at 0, ``rate`` per second on average.

    ``poisson`` draws exponential gaps from ``seed``; ``uniform`` keeps them equal.
    """
    draw = random.Random(seed)
    offsets, now = [], 0.0
    for _ in range(sessions):
        offsets.append(now)
        now += draw.expovariate(rate) if process == "poisson" else 1.0 / rate
    return offsets


async def run_sessions(
    start: Callable[[int, float], Awaitable[SessionResult]],
    offsets: Sequence[float],
    concurrency: int | None,
) -> list[SessionResult]:
    """Start sessions at their offsets, at most ``concurrency`` at once; results in order.

    Raises:
        BenchmarkError: of the first session that failed; the others are closed.
    """
    began = time.perf_counter()
    slots = asyncio.Semaphore(concurrency or len(offsets))

    async def one(index: int) -> SessionResult:
        await asyncio.sleep(max(0.0, began + offsets[index] - time.perf_counter()))
        async with slots:
            return await start(index, began)

    tasks = [asyncio.create_task(one(index)) for index in range(len(offsets))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of the command line; exits with 2 where they make no sense."""
    parser = argparse.ArgumentParser(description="Benchmark of live worlds over a WebSocket.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    args.sessions = _session_count(args)
    return args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark, behind the word that vLLM's command of this name has there."""
    parser.add_argument("what", nargs="?", choices=["serve"], help="a running server, always")
    _add_target_flags(parser.add_argument)
    _add_workload_flags(parser.add_argument)
    _add_run_flags(parser.add_argument)


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return count


def _above_zero(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _add_target_flags(add: Callable[..., object]) -> None:
    add("--host", default="127.0.0.1")
    add("--port", type=integer, default=8000)
    add("--base-url", help="http(s) or ws(s) address instead of host and port")
    add("--api-key", help="key of the server, where it needs one")
    add("--model", help="served name; left out of the start message when not given")


def _add_workload_flags(add: Callable[..., object]) -> None:
    add("--workload", type=Path, help="JSON file; flags override it")
    add("--image", help="path or URL of the first picture (default: a drawn scene)")
    add("--prompt", help="text of the world")
    add("--negative-prompt", help="no effect on this model")
    add("--num-chunks", type=_at_least(1), help="length (default 16)")
    add("--camera-pattern", choices=CAMERA_PATTERNS, help="default forward")
    add(
        "--width", type=integer, help="with neither side: the server's size, 832x480 if it has none"
    )
    add("--height", type=integer, help="with the width alone: 480")
    add(
        "--fps",
        type=number,
        help="rate of the video that is made (default 16: 750 ms a chunk)",
    )
    add("--seed", type=integer, help="default 42")
    add("--flow-shift", type=number, help="default 5.0")


def _add_run_flags(add: Callable[..., object]) -> None:
    count = _at_least(1)
    add("--sessions", type=count, help="measured sessions (default: --concurrency, else 1)")
    add("--warmup-sessions", type=_at_least(0), default=0, help="run first, not measured")
    add("--concurrency", type=count, help="sessions at once (default 1; no limit with a rate)")
    add("--arrival-rate", type=_above_zero,
        help="sessions started per second, whatever the others do")  # fmt: skip
    add("--arrival-process", choices=("poisson", "uniform"), default="poisson")
    add("--warmup-chunks", type=_at_least(0), default=DEFAULT_WARMUP_CHUNKS,
        help="first chunks that steady figures leave out")  # fmt: skip
    add("--chunk-slo-ms", type=number, help="deadline of a chunk (default: its playing time)")
    add("--target-fps", type=_above_zero, help="rate that counts as real time (default: --fps)")
    add("--playback-buffer-chunks", type=count, default=1)
    add("--first-chunk-timeout", type=number, default=900.0, help="seconds")
    add("--chunk-timeout", type=number, default=300.0, help="seconds")
    add("--ping-interval", type=number, default=20.0, help="seconds between session.ping, 0 = off")
    add("--output-json", type=Path, help="file of all figures")
    add("--save-video", type=Path, help="MP4 of the last session")
    add("--print-chunks", action="store_true", help="a line for each chunk")


def _workload(
    args: argparse.Namespace, find_size: Callable[[], tuple[int, int] | None] | None = None
) -> Workload:
    names = ("image", "prompt", "negative_prompt", "num_chunks", "camera_pattern", "width",
             "height", "fps", "seed", "flow_shift")  # fmt: skip
    overrides = {name: vars(args)[name] for name in names}
    return load_workload(args.workload, overrides, find_size=find_size)


def _options(args: argparse.Namespace, *, chatty: bool, keep_video: bool) -> SessionOptions:
    return SessionOptions(
        first_chunk_timeout_s=args.first_chunk_timeout,
        chunk_timeout_s=args.chunk_timeout,
        ping_interval_s=args.ping_interval,
        on_chunk=_print_chunk if chatty else None,
        api_key=args.api_key,
        keep_video=keep_video,
    )


def _print_chunk(chunk: ChunkRecord) -> None:
    since = "first" if chunk.inter_arrival_ms is None else f"+{chunk.inter_arrival_ms:.1f} ms"
    print(
        f"  chunk {chunk.index:4d}  {chunk.arrival_s:9.3f} s  {since}  "
        f"{chunk.num_frames} frames  {chunk.byte_length} bytes"
    )


def _session_count(args: argparse.Namespace) -> int:
    return args.sessions or args.concurrency or 1


async def _measure(
    args: argparse.Namespace, endpoint: str, workload: Workload
) -> list[SessionResult]:
    async def play(index: int, began: float, options: SessionOptions) -> SessionResult:
        return await run_session(
            endpoint, workload, options, model=args.model, session_index=index, run_began=began
        )

    async def start(index: int, began: float) -> SessionResult:
        saved = args.save_video is not None and index == _session_count(args) - 1
        return await play(index, began, _options(args, chatty=args.print_chunks, keep_video=saved))

    for index in range(args.warmup_sessions):
        print(f"Warm-up session {index + 1}/{args.warmup_sessions}")
        quiet = _options(args, chatty=False, keep_video=False)
        await play(index, time.perf_counter(), quiet)
    if args.arrival_rate is None:
        return await run_sessions(start, [0.0] * _session_count(args), args.concurrency or 1)
    offsets = arrival_offsets(
        _session_count(args), args.arrival_rate, process=args.arrival_process, seed=workload.seed
    )
    return await run_sessions(start, offsets, args.concurrency)


def _basis(args: argparse.Namespace, workload: Workload) -> Basis:
    return Basis(
        fps=args.target_fps or workload.fps,
        warmup_chunks=args.warmup_chunks,
        chunk_slo_ms=args.chunk_slo_ms,
        buffer_chunks=args.playback_buffer_chunks,
    )


def _config(args: argparse.Namespace, workload: Workload) -> dict[str, object]:
    typed = ("warmup_sessions", "warmup_chunks", "chunk_slo_ms", "playback_buffer_chunks",
             "concurrency", "arrival_rate")  # fmt: skip
    return {name: vars(args)[name] for name in typed} | {
        "sessions": _session_count(args),
        "camera_pattern": workload.camera_pattern,
        "target_fps": args.target_fps or workload.fps,
        "mux_fps": workload.fps,
        "workload_file": None if args.workload is None else str(args.workload),
        "arrival_process": None if args.arrival_rate is None else args.arrival_process,
    }


def _run(args: argparse.Namespace) -> None:
    endpoint = endpoint_url(args.base_url, args.host, args.port)
    print(f"Connecting to {endpoint}")
    workload = _workload(args, lambda: served_size(endpoint, args.api_key))
    basis = _basis(args, workload)
    print(
        f"Rollout: {workload.num_chunks} chunks, {workload.num_frames} frames, "
        f"{workload.width}x{workload.height}, {workload.video_seconds:.2f} s at "
        f"{workload.fps:g} fps, seed {workload.seed}"
    )
    print(f"Real time: {basis.chunk_video_ms:.1f} ms per chunk at {basis.fps:g} fps")
    results = asyncio.run(_measure(args, endpoint, workload))
    per_session = [
        compute_metrics(result.chunks, wall_seconds=result.wall_seconds, basis=basis)
        for result in results
    ]
    makespan_s = None
    if args.concurrency is not None or args.arrival_rate is not None:
        first = min(result.start_offset_s for result in results)
        makespan_s = max(r.start_offset_s + r.wall_seconds for r in results) - first
    total = aggregate_metrics(per_session, fps=basis.fps, makespan_s=makespan_s)
    _print_reports(per_session, total)
    for text in report.warnings(
        workload, min(int(str(m["steady_chunks"])) for m in per_session), args.warmup_chunks
    ):
        print(f"WARNING: {text}", file=sys.stderr)
    if args.output_json is not None:
        config = _config(args, workload)
        described = {"endpoint": endpoint, "model": args.model, "config": config}
        text = report.report_json(described, workload, results, per_session, total)
        _write(args.output_json, text.encode())
    if args.save_video is not None:
        _write(args.save_video, results[-1].video)


def _print_reports(per_session: list[dict[str, object]], total: dict[str, object]) -> None:
    for index, metrics in enumerate(per_session):
        title = "LingBot-World" if len(per_session) == 1 else f"Session {index}"
        print(report.session_report(metrics, title=title))
    if len(per_session) > 1:
        print(report.total_report(total))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"Wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark of a command line."""
    return run(parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; returns its exit status."""
    try:
        _run(args)
    except (BenchmarkError, OSError, ValueError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0
