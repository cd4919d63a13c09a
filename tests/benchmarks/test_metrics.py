"""Figures of recorded timelines, by hand and against the standard library."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.benchmarks.metrics import (
    Basis,
    ChunkRecord,
    aggregate_metrics,
    compute_metrics,
    percentile,
    simulate_playback,
)
from vllm_omni.diffusion.geometry import chunk_pixel_frames

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


FPS = 16.0


def timeline(arrivals_s: list[float], frames: list[int] | None = None) -> list[ChunkRecord]:
    """Records of chunks that arrived at these times."""
    frames = frames or [chunk_pixel_frames(index) for index in range(len(arrivals_s))]
    return [
        ChunkRecord(
            index=index,
            arrival_s=arrival,
            inter_arrival_ms=(arrival - arrivals_s[index - 1]) * 1000 if index else None,
            byte_length=100,
            num_frames=frames[index],
        )
        for index, arrival in enumerate(arrivals_s)
    ]


def test_percentiles_interpolate_between_ranks():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 90) == pytest.approx(3.7)
    assert percentile([7.0], 99) == 7.0
    for values, q in (([], 50), ([1.0], 101)):
        with pytest.raises(ValueError, match="need values"):
            percentile(values, q)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values):
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    got = [percentile(values, q) for q in range(1, 100)]
    assert got == pytest.approx(cuts, rel=1e-9, abs=1e-6)


def test_a_recorded_timeline():
    """Eight chunks, one of them a second late, the last one short: every figure by hand."""
    arrivals = [2.0, 2.8, 3.6, 4.4, 6.2, 7.0, 7.8, 8.2]
    chunks = timeline(arrivals, [9, 12, 12, 12, 12, 12, 12, 6])
    metrics = compute_metrics(chunks, wall_seconds=8.2, basis=Basis(fps=FPS, warmup_chunks=3))
    assert metrics["total_frames"] == 87
    assert metrics["total_bytes"] == 800
    assert metrics["ttfc_ms"] == pytest.approx(2000)
    assert metrics["video_seconds"] == pytest.approx(87 / 16)
    assert metrics["video_rtf"] == pytest.approx(8.2 / (87 / 16))
    assert metrics["video_rtfx"] == pytest.approx((87 / 16) / 8.2)
    assert metrics["frames_per_second"] == pytest.approx(87 / 8.2)
    assert metrics["chunk_deadline_ms"] == 750
    # Chunks 3 to 6: the warm-up and the short last chunk are left out.
    steady = metrics["interval_steady"]
    assert steady["count"] == 4.0
    assert steady["mean_ms"] == pytest.approx((800 * 3 + 1800) / 4)
    assert steady["median_ms"] == pytest.approx(800)
    assert steady["std_ms"] == pytest.approx(500)
    assert steady["p99_ms"] == pytest.approx(800 + 0.97 * 1000)
    assert metrics["interval_all"]["count"] == 7.0
    assert metrics["steady_video_rtf"] == pytest.approx(1050 / 750)
    assert metrics["steady_video_rtfx"] == pytest.approx(750 / 1050)
    assert (metrics["slo_attainment"], metrics["slo_violations"]) == (0.0, 4)
    # Chunk 0 plays 0.5625 s from 2.0 s; afterwards each chunk is late by its excess over
    # 0.75 s, and the last one arrives while the one before it plays.
    playback = metrics["playback"]
    stalls = [0.2375, 0.05, 0.05, 1.05, 0.05, 0.05]
    assert playback["underrun_count"] == 6
    assert playback["first_underrun_chunk"] == 1
    assert playback["total_stall_ms"] == pytest.approx(1000 * sum(stalls))
    span = 87 / 16 + sum(stalls)
    assert playback["playback_span_s"] == pytest.approx(span)
    assert playback["stall_ratio"] == pytest.approx(sum(stalls) / span)


def test_rtf_is_a_cost():
    fast, slow = (
        compute_metrics(timeline([1.0, 1.0 + gap]), wall_seconds=1 + gap, basis=Basis(FPS, 0))
        for gap in (0.1, 3.0)
    )
    assert fast["video_rtf"] < 1 < slow["video_rtf"]
    assert fast["steady_video_rtf"] < 1 < slow["steady_video_rtf"]


def test_the_first_interval_never_counts():
    metrics = compute_metrics(
        timeline([5.0, 6.0, 7.0]), wall_seconds=7, basis=Basis(FPS, warmup_chunks=0)
    )
    assert metrics["steady_chunks"] == 2
    assert metrics["interval_steady"]["max_ms"] == pytest.approx(1000)


def test_a_short_run_is_not_steady():
    metrics = compute_metrics(timeline([1, 2, 3]), wall_seconds=3, basis=Basis(FPS, 6))
    assert metrics["steady_state_reached"] is False
    assert metrics["interval_steady"] == {}
    assert "steady_video_rtf" not in metrics
    assert "slo_attainment" not in metrics


def test_the_deadline_counts_steady_chunks_alone():
    chunks = timeline([1.0, 4.0, 4.5, 5.0, 5.7])
    metrics = compute_metrics(
        chunks, wall_seconds=5.7, basis=Basis(FPS, warmup_chunks=2, chunk_slo_ms=600)
    )
    assert metrics["chunk_deadline_ms"] == 600
    assert metrics["slo_violations"] == 1
    assert metrics["slo_attainment"] == pytest.approx(2 / 3)


def test_the_target_rate_is_the_basis():
    metrics = compute_metrics(
        timeline([1.0, 1.9, 2.8]), wall_seconds=2.8, basis=Basis(12.0, warmup_chunks=1)
    )
    assert metrics["chunk_deadline_ms"] == 1000
    assert metrics["steady_video_rtf"] == pytest.approx(0.9)


def test_a_failure_is_not_a_zero():
    with pytest.raises(ValueError, match="without chunks"):
        compute_metrics([], wall_seconds=1.0, basis=Basis(FPS))
    with pytest.raises(ValueError, match="no session"):
        aggregate_metrics([], fps=FPS)


def test_a_deeper_buffer_absorbs_a_stall():
    chunks = timeline([1.0, 2.0, 2.1, 2.2])
    shallow, deep = (simulate_playback(chunks, FPS, depth) for depth in (1, 2))
    assert shallow.underrun_count == 1
    assert shallow.total_stall_ms == pytest.approx(437.5)
    assert (deep.underrun_count, deep.first_underrun_chunk) == (0, None)
    assert deep.playback_span_s == pytest.approx(45 / 16)


@pytest.mark.parametrize("depth", [0, 4])
def test_an_impossible_buffer_is_refused(depth):
    with pytest.raises(ValueError, match="1 <= buffer <= 3"):
        simulate_playback(timeline([1, 2, 3]), FPS, depth)


def test_aggregate_of_several_sessions():
    sessions = [
        compute_metrics(timeline([1.0, 1.0 + g, 1.0 + 2 * g]), wall_seconds=1 + 2 * g,
                        basis=Basis(FPS, warmup_chunks=1))
        for g in (0.5, 0.7)
    ]  # fmt: skip
    total = aggregate_metrics(sessions, fps=FPS, makespan_s=3.0)
    assert (total["sessions"], total["chunks_received"], total["total_frames"]) == (2, 6, 66)
    assert total["steady_interval_ms_mean"] == pytest.approx(600)
    assert total["steady_interval_ms_spread"] == pytest.approx(200)
    assert total["video_rtf_best"] == pytest.approx(2.0 / (33 / 16))
    assert total["video_rtf_worst"] == pytest.approx(2.4 / (33 / 16))
    assert total["wall_seconds"] == pytest.approx(4.4)
    assert total["total_frames_per_second"] == pytest.approx(22)
    assert total["ttfc_ms_max"] == pytest.approx(1000)
    assert total["chunk_deadline_ms"] == 750


def test_aggregate_of_one_session_is_that_session():
    one = compute_metrics(timeline([1, 2]), wall_seconds=2, basis=Basis(FPS))
    assert aggregate_metrics([one], fps=FPS) == {**one, "sessions": 1}
