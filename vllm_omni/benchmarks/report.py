"""What the benchmark prints and the JSON it writes."""

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from vllm_omni.benchmarks.metrics import SMALL_SAMPLE, ChunkRecord
from vllm_omni.benchmarks.workload import Workload

COLUMNS = 60


@dataclass(frozen=True, slots=True)
class SessionResult:
    """One finished session as its client saw it.

    Attributes:
        start_offset_s: when its start message was sent, since the run began.
        video_start_s: arrival of ``video.start`` since the start message.
        wall_seconds: from the start message to the last media payload.
        video: all binary payloads in order; empty where it was not to be kept.
    """

    session_index: int
    request_id: str
    start_offset_s: float
    video_start_s: float
    wall_seconds: float
    chunks: tuple[ChunkRecord, ...]
    video: bytes


def report_json(
    described: Mapping[str, object],
    workload: Workload,
    results: Sequence[SessionResult],
    per_session: Sequence[Mapping[str, object]],
    total: Mapping[str, object],
) -> str:
    """The whole result as text: sorted keys, indent 2, final newline.

    Args:
        described: where and how the run was made: ``endpoint``, ``model`` and ``config``.
    """
    content = {
        "benchmark": "lingbot_world_realtime",
        "timestamp": datetime.now(UTC).isoformat(),
        **described,
        "git_revision": git_revision(),
        "hostname": socket.gethostname(),
        "workload": _workload_json(workload),
        "sessions": [
            _session_json(result, metrics)
            for result, metrics in zip(results, per_session, strict=True)
        ],
        "metrics": total,
    }
    return json.dumps(content, sort_keys=True, indent=2) + "\n"


def _workload_json(workload: Workload) -> dict[str, object]:
    names = ("num_chunks", "num_frames", "width", "height", "fps", "seed", "flow_shift")
    values = {"num_frames": workload.num_frames, **asdict(workload)}
    updates = [
        {"after_chunk": update.after_chunk, "transition_chunks": update.transition_chunks}
        for update in workload.prompt_updates
    ]
    return {
        **{name: values[name] for name in names},
        "video_seconds": workload.video_seconds,
        "prompt_updates": updates,
    }


def _session_json(result: SessionResult, metrics: Mapping[str, object]) -> dict[str, object]:
    return {
        "session_index": result.session_index,
        "request_id": result.request_id,
        "start_offset_s": result.start_offset_s,
        "video_start_ms": result.video_start_s * 1000.0,
        "chunks": [asdict(chunk) for chunk in result.chunks],
        "metrics": metrics,
    }


def git_revision() -> str | None:
    """Revision of the checkout that holds this file, ``None`` outside of one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def session_report(metrics: Mapping[str, object], *, title: str) -> str:
    """The figures of one session in three sections."""
    steady = _table(metrics["interval_steady"])
    shown, label = (steady, "steady") if steady else (_table(metrics["interval_all"]), "all")
    playback = _table(metrics["playback"])
    cadence = [
        ("Chunks received", _show(metrics["chunks_received"])),
        ("Time to first chunk", _ms(metrics["ttfc_ms"])),
        (f"Intervals measured ({label})", _show(shown.get("count", 0.0))),
    ]
    cadence += [
        (f"{name} interval", _ms(shown[key]))
        for name, key in (
            ("Mean", "mean_ms"), ("Median", "median_ms"), ("Std of", "std_ms"),
            ("Min", "min_ms"), ("P90", "p90_ms"), ("P95", "p95_ms"), ("P99", "p99_ms"),
            ("Max", "max_ms"),
        )
        if key in shown
    ]  # fmt: skip
    real_time = [
        ("Video made", f"{_show(metrics['video_seconds'])} s"),
        ("Wall time", f"{_show(metrics['wall_seconds'])} s"),
        ("RTF (cost, below 1 is real time)", _show(metrics["video_rtf"])),
        ("Frames per second", _show(metrics["frames_per_second"])),
        ("Chunk deadline", _ms(metrics["chunk_deadline_ms"])),
    ]
    if "steady_video_rtf" in metrics:
        attained = metrics["slo_attainment"]
        share = attained * 100 if isinstance(attained, float) else 0.0
        real_time += [
            ("Steady RTF", _show(metrics["steady_video_rtf"])),
            ("Steady RTFx", _show(metrics["steady_video_rtfx"])),
            ("Intervals within the deadline", f"{share:.1f} %"),
        ]
    continuity = [
        ("Buffered chunks", _show(playback["buffer_chunks"])),
        ("Underruns", _show(playback["underrun_count"])),
        ("Stalled", _ms(playback["total_stall_ms"])),
        ("First late chunk", _show(playback["first_underrun_chunk"])),
    ]
    return "\n".join([
        f"{f' {title} ':=^{COLUMNS}}",
        *_section("Cadence", cadence),
        *_section("Real time", real_time),
        *_section("Playback continuity", continuity),
        "=" * COLUMNS,
    ])  # fmt: skip


def total_report(total: Mapping[str, object]) -> str:
    """The figures across sessions in one section."""
    rows = [
        ("Sessions", _show(total["sessions"])),
        ("Chunks received", _show(total["chunks_received"])),
    ]
    rows += [
        (label, show(total[name]))
        for label, name, show in (
            ("Mean time to first chunk", "ttfc_ms_mean", _ms),
            ("Longest time to first chunk", "ttfc_ms_max", _ms),
            ("Mean RTF", "video_rtf_mean", _show),
            ("Best RTF", "video_rtf_best", _show),
            ("Worst RTF", "video_rtf_worst", _show),
            ("Mean steady interval", "steady_interval_ms_mean", _ms),
            ("Spread of steady intervals", "steady_interval_ms_spread", _ms),
            ("Underruns", "underrun_count", _show),
            ("Seconds from first start to last end", "makespan_seconds", _show),
            ("Frames per second of all sessions", "total_frames_per_second", _show),
        )
        if name in total
    ]
    return "\n".join([*_section("Across sessions", rows), "=" * COLUMNS])


def warnings(workload: Workload, steady_chunks: int, warmup_chunks: int) -> list[str]:
    """Reasons to read the figures with care."""
    if warmup_chunks >= workload.num_chunks:
        return [
            f"the warm-up of {warmup_chunks} chunks covers the whole rollout of "
            f"{workload.num_chunks}; there are no steady figures"
        ]
    if steady_chunks < SMALL_SAMPLE:
        return [
            f"only {steady_chunks} steady intervals: P95 and P99 are close to the maximum; "
            "raise --num-chunks"
        ]
    return []


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    width = COLUMNS - 40
    return [f"{f' {title} ':-^{COLUMNS}}", *(f"{name:<40}{value:>{width}}" for name, value in rows)]


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _ms(value: object) -> str:
    return f"{value:.2f} ms" if isinstance(value, int | float) else "-"
