"""From the arrival times of chunks to figures: pure functions, no clock and no socket.

A real-time factor (RTF) is a cost: time spent over time of video made, below 1 is faster than real
time. Its inverse is RTFx. Percentiles interpolate linearly between ranks.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES, chunk_play_ms

Number = float | int
SMALL_SAMPLE = 20
"""Below this many intervals, P95 and P99 are little more than the maximum."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One media payload as the client saw it.

    Attributes:
        index: of the chunk in its rollout, from 0.
        arrival_s: seconds since the start message was sent.
        inter_arrival_ms: since the previous chunk, ``None`` for the first.
        num_frames: pixel frames, as the server says.
    """

    index: int
    arrival_s: Number
    inter_arrival_ms: Number | None
    byte_length: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class Basis:
    """What sessions are measured against.

    Attributes:
        fps: playback rate that counts as real time, in pixel frames per second.
        warmup_chunks: first chunks that steady figures leave out.
        chunk_slo_ms: deadline of an interval, ``None`` for the playing time of a chunk.
        buffer_chunks: chunks that a player collects before it starts.
    """

    fps: Number
    warmup_chunks: int = 6
    chunk_slo_ms: Number | None = None
    buffer_chunks: int = 1

    @property
    def chunk_video_ms(self) -> Number:
        """Playing time of a full chunk."""
        return chunk_play_ms(self.fps)

    @property
    def deadline_ms(self) -> Number:
        """Longest interval that counts as in time."""
        return self.chunk_video_ms if self.chunk_slo_ms is None else self.chunk_slo_ms


def percentile(values: Sequence[Number], q: Number) -> Number:
    """The ``q``-th percentile (0 to 100), linear between ranks.

    Raises:
        ValueError: no values, or ``q`` outside 0 to 100.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"need values and 0 <= q <= 100, got {len(values)} values, q={q}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def interval_stats(intervals_ms: Sequence[Number]) -> dict[str, Number]:
    """Spread of intervals; empty where there are none."""
    if not intervals_ms:
        return {}
    return {
        "count": float(len(intervals_ms)),
        "mean_ms": statistics.fmean(intervals_ms),
        "median_ms": statistics.median(intervals_ms),
        "std_ms": statistics.stdev(intervals_ms) if len(intervals_ms) > 1 else 0.0,
        "min_ms": min(intervals_ms),
        "p90_ms": percentile(intervals_ms, 90),
        "p95_ms": percentile(intervals_ms, 95),
        "p99_ms": percentile(intervals_ms, 99),
        "max_ms": max(intervals_ms),
    }


@dataclass(frozen=True, slots=True)
class Playback:
    """What a viewer would have seen.

    Attributes:
        playback_span_s: from the first picture shown to the last, stalls included.
        stall_ratio: share of the span that stood still.
        first_underrun_chunk: index of the first chunk that came too late, or ``None``.
    """

    underrun_count: int
    total_stall_ms: Number
    playback_span_s: Number
    stall_ratio: Number
    first_underrun_chunk: int | None
    buffer_chunks: int


def simulate_playback(
    chunks: Sequence[ChunkRecord], fps: Number, buffer_chunks: int = 1
) -> Playback:
    """Play chunks as they arrived: start with ``buffer_chunks`` in hand, stall where one is late.

    Raises:
        ValueError: the buffer is empty or larger than the rollout.
    """
    if not 1 <= buffer_chunks <= len(chunks):
        raise ValueError(
            f"a playback buffer of {buffer_chunks} chunks needs 1 <= buffer <= {len(chunks)}, "
            "the chunks of the rollout; set --playback-buffer-chunks"
        )
    start = cursor = chunks[buffer_chunks - 1].arrival_s
    stalls: list[tuple[int, float]] = []
    for chunk in chunks:
        if chunk.arrival_s > cursor:
            stalls.append((chunk.index, chunk.arrival_s - cursor))
            cursor = chunk.arrival_s
        cursor += chunk.num_frames / fps
    stalled_s = math.fsum(stall for _, stall in stalls)
    span_s = cursor - start
    return Playback(
        underrun_count=len(stalls),
        total_stall_ms=stalled_s * 1000.0,
        playback_span_s=span_s,
        stall_ratio=stalled_s / span_s if span_s > 0 else 0.0,
        first_underrun_chunk=stalls[0][0] if stalls else None,
        buffer_chunks=buffer_chunks,
    )


def compute_metrics(
    chunks: Sequence[ChunkRecord], *, wall_seconds: Number, basis: Basis
) -> dict[str, object]:
    """All figures of one session.

    Steady intervals are those that end in a full chunk after the warm-up: a short last chunk
    takes less time to make and would flatter the mean.

    Raises:
        ValueError: there are no chunks; a failed session is not a fast one.
    """
    if not chunks:
        raise ValueError("a session without chunks has no metrics")
    total_frames = sum(chunk.num_frames for chunk in chunks)
    video_seconds = total_frames / basis.fps
    steady = _steady_intervals(chunks, basis.warmup_chunks)
    every = [c.inter_arrival_ms for c in chunks if c.inter_arrival_ms is not None]
    metrics: dict[str, object] = {
        "chunks_received": len(chunks),
        "warmup_chunks": basis.warmup_chunks,
        "steady_chunks": len(steady),
        "steady_state_reached": bool(steady),
        "total_frames": total_frames,
        "total_bytes": sum(chunk.byte_length for chunk in chunks),
        "video_seconds": video_seconds,
        "wall_seconds": wall_seconds,
        "video_rtf": wall_seconds / video_seconds,
        "video_rtfx": video_seconds / wall_seconds,
        "frames_per_second": total_frames / wall_seconds,
        "chunk_deadline_ms": basis.deadline_ms,
        "interval_all": interval_stats(every),
        "interval_steady": interval_stats(steady),
        "ttfc_ms": chunks[0].arrival_s * 1000.0,
        "playback": asdict(simulate_playback(chunks, basis.fps, basis.buffer_chunks)),
    }
    return metrics | _steady_metrics(steady, basis)


def _steady_intervals(chunks: Sequence[ChunkRecord], warmup_chunks: int) -> list[Number]:
    return [
        chunk.inter_arrival_ms
        for chunk in chunks
        if chunk.inter_arrival_ms is not None
        and chunk.index >= warmup_chunks
        and chunk.num_frames >= CHUNK_PIXEL_FRAMES
    ]


def _steady_metrics(steady: Sequence[Number], basis: Basis) -> dict[str, object]:
    if not steady:
        return {}
    rtf = statistics.fmean(steady) / basis.chunk_video_ms
    late = sum(interval > basis.deadline_ms for interval in steady)
    return {
        "steady_video_rtf": rtf,
        "steady_video_rtfx": 1.0 / rtf,
        "slo_attainment": 1.0 - late / len(steady),
        "slo_violations": late,
    }


def aggregate_metrics(
    per_session: Sequence[Mapping[str, object]], *, fps: Number, makespan_s: Number | None = None
) -> dict[str, object]:
    """Figures of several sessions together; of one session, its own.

    Args:
        fps: playback rate that counts as real time.
        makespan_s: from the first start to the last end, where sessions overlapped.

    Raises:
        ValueError: there are no sessions.
    """
    if not per_session:
        raise ValueError("no session was measured")
    total: dict[str, object] = {}
    if makespan_s is not None:
        frames = sum(_numbers(per_session, "total_frames"))
        total = {"makespan_seconds": makespan_s, "total_frames_per_second": frames / makespan_s}
    if len(per_session) == 1:
        return {**per_session[0], "sessions": 1, **total}
    rtfs = _numbers(per_session, "video_rtf")
    ttfcs = _numbers(per_session, "ttfc_ms")
    means = _numbers(_parts(per_session, "interval_steady"), "mean_ms")
    summed = ("chunks_received", "total_frames", "video_seconds", "wall_seconds")
    aggregate: dict[str, object] = {
        "sessions": len(per_session),
        **{name: sum(_numbers(per_session, name)) for name in summed},
        "video_rtf_mean": statistics.fmean(rtfs),
        "video_rtf_best": min(rtfs),
        "video_rtf_worst": max(rtfs),
        "ttfc_ms_mean": statistics.fmean(ttfcs),
        "ttfc_ms_max": max(ttfcs),
        "underrun_count": sum(_numbers(_parts(per_session, "playback"), "underrun_count")),
        "chunk_deadline_ms": chunk_play_ms(fps),
    }
    if means:
        aggregate["steady_interval_ms_mean"] = statistics.fmean(means)
        aggregate["steady_interval_ms_spread"] = max(means) - min(means)
    return aggregate | total


def _numbers(rows: Sequence[Mapping[str, object]], name: str) -> list[Number]:
    return [value for row in rows if isinstance(value := row.get(name), int | float)]


def _parts(rows: Sequence[Mapping[str, object]], name: str) -> list[Mapping[str, object]]:
    return [part for row in rows if isinstance(part := row[name], Mapping)]
