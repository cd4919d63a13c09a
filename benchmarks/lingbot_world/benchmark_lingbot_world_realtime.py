"""Measures live worlds as a viewer gets them, over the WebSocket of a running server.

    python benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py --port 8000 --num-chunks 16

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

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lingbot_world import report
from benchmarks.lingbot_world.metrics import (
    Basis,
    ChunkRecord,
    aggregate_metrics,
    compute_metrics,
    percentile,
    simulate_playback,
)
from benchmarks.lingbot_world.report import RunDescription, SessionResult
from benchmarks.lingbot_world.session import (
    BenchmarkError,
    SessionOptions,
    endpoint_url,
    run_session,
    served_size,
)
from benchmarks.lingbot_world.workload import (
    CAMERA_PATTERNS,
    DEFAULT_WARMUP_CHUNKS,
    Workload,
    load_workload,
)

__all__ = [
    "BenchmarkError",
    "SessionOptions",
    "aggregate_metrics",
    "compute_metrics",
    "endpoint_url",
    "main",
    "parse_args",
    "percentile",
    "run_session",
    "simulate_playback",
]


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
    _add_target_flags(parser)
    _add_workload_flags(parser)
    _add_run_flags(parser)
    args = parser.parse_args(argv)
    if args.sessions is None:
        args.sessions = args.concurrency or 1
    if args.target_fps is not None and args.target_fps <= 0:
        parser.error(f"--target-fps must be above 0, got {args.target_fps}")
    if args.arrival_rate is not None and args.arrival_rate <= 0:
        parser.error(f"--arrival-rate must be above 0, got {args.arrival_rate}")
    if args.num_chunks is not None and args.num_chunks < 1:
        parser.error(f"--num-chunks must be at least 1, got {args.num_chunks}")
    for name, least in (("sessions", 1), ("warmup_sessions", 0), ("warmup_chunks", 0),
                        ("playback_buffer_chunks", 1), ("concurrency", 1)):  # fmt: skip
        value = vars(args)[name]
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    return args


def _add_target_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--base-url", help="http(s) or ws(s) address instead of host and port")
    add("--api-key", help="key of the server, where it needs one")
    add("--model", help="served name; left out of the start message when not given")


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", type=Path, help="JSON file; flags override it")
    add("--image", help="path or URL of the first picture (default: a drawn scene)")
    add("--prompt")
    add("--negative-prompt")
    add("--num-chunks", type=int, help="length (default 16)")
    add("--camera-pattern", choices=CAMERA_PATTERNS, help="default forward")
    add("--width", type=int, help="with neither side: the server's size, 832x480 if it has none")
    add("--height", type=int, help="with the width alone: 480")
    add("--fps", type=float, help="rate of the video that is made (default 16)")
    add("--seed", type=int, help="default 42")
    add("--flow-shift", type=float, help="default 5.0")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sessions", type=int, help="measured sessions (default: --concurrency, else 1)")
    add("--warmup-sessions", type=int, default=0, help="run first, not measured")
    add("--concurrency", type=int, help="sessions at once (default 1; no limit with a rate)")
    add("--arrival-rate", type=float, help="sessions started per second, whatever the others do")
    add("--arrival-process", choices=("poisson", "uniform"), default="poisson")
    add("--warmup-chunks", type=int, default=DEFAULT_WARMUP_CHUNKS,
        help="first chunks that steady figures leave out")  # fmt: skip
    add("--chunk-slo-ms", type=float, help="deadline of a chunk (default: its playing time)")
    add("--target-fps", type=float, help="rate that counts as real time (default: --fps)")
    add("--playback-buffer-chunks", type=int, default=1)
    add("--first-chunk-timeout", type=float, default=900.0, help="seconds")
    add("--chunk-timeout", type=float, default=300.0, help="seconds")
    add("--ping-interval", type=float, default=20.0, help="seconds between session.ping, 0 = off")
    add("--output-json", type=Path)
    add("--save-video", type=Path, help="MP4 of the last session")
    add("--print-chunks", action="store_true")


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


async def _measure(
    args: argparse.Namespace, endpoint: str, workload: Workload
) -> list[SessionResult]:
    async def play(index: int, began: float, options: SessionOptions) -> SessionResult:
        return await run_session(
            endpoint, workload, options, model=args.model, session_index=index, run_began=began
        )

    async def start(index: int, began: float) -> SessionResult:
        saved = args.save_video is not None and index == args.sessions - 1
        return await play(index, began, _options(args, chatty=args.print_chunks, keep_video=saved))

    for index in range(args.warmup_sessions):
        print(f"Warm-up session {index + 1}/{args.warmup_sessions}")
        quiet = _options(args, chatty=False, keep_video=False)
        await play(index, time.perf_counter(), quiet)
    if args.arrival_rate is None:
        return await run_sessions(start, [0.0] * args.sessions, args.concurrency or 1)
    offsets = arrival_offsets(
        args.sessions, args.arrival_rate, process=args.arrival_process, seed=workload.seed
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
    return {
        "sessions": args.sessions,
        "warmup_sessions": args.warmup_sessions,
        "warmup_chunks": args.warmup_chunks,
        "camera_pattern": workload.camera_pattern,
        "chunk_slo_ms": args.chunk_slo_ms,
        "target_fps": args.target_fps or workload.fps,
        "mux_fps": workload.fps,
        "playback_buffer_chunks": args.playback_buffer_chunks,
        "workload_file": None if args.workload is None else str(args.workload),
        "concurrency": args.concurrency,
        "arrival_rate": args.arrival_rate,
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
    run = RunDescription(endpoint, args.model, workload, _config(args, workload))
    if args.output_json is not None:
        text = report.report_json(run, results, per_session, total)
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
    """Run the benchmark of the command line."""
    args = parse_args(argv)
    try:
        _run(args)
    except (BenchmarkError, OSError, ValueError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
