"""The tiny checkpoint on several worker processes: chunk time, exchanges, their bytes and share."""

import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.lingbot_world.bench_small import PARTS, bench_request, part_ms
from benchmarks.lingbot_world.roofline_counts import VARIANTS, chunk_exchange, read_model
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import TrafficKind
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, ChunkTimings

_TRIMMED = next(variant for variant in VARIANTS if variant.key == "D")
_SESSION = "bench"
_ELEMENT_BYTES = 4
_MODEL_PARTS = ("camera_ms", "probes_ms", "commit_ms")
"""Parts of a chunk in which the transformer's tokens are exchanged."""


def ranks_run(
    model: Path, geometry: VideoGeometry, device: str, chunks: int, ulysses_degree: int
) -> dict[str, object]:
    """Run a rollout on ``ulysses_degree`` ranks, float32, and count what the root exchanged.

    Figures are of all chunks but the first, in which connections and caches warm up. The time of
    exchanges is what the root's host spent inside the calls, waiting for other ranks included: on
    a CPU that is their time, on a device that queues work it is not.
    """
    config = OmniDiffusionConfig(
        model=str(model),
        device=device,
        dtype="float32",
        geometry=geometry,
        executor="mp",
        parallel=DiffusionParallelConfig(ulysses_degree=ulysses_degree),
    )
    executor = MultiprocExecutor(config)
    executor.start()
    try:
        executor.open_session(_SESSION, bench_request(model, geometry, chunks))
        _chunk(executor, 0)
        before = executor.traffic()
        timings = [_chunk(executor, index) for index in range(1, chunks)]
        after = executor.traffic()
    finally:
        executor.shutdown()
    counted, whole = len(timings), _difference(after.total, before.total)
    counts = replace(
        read_model(
            model / "transformer" / "config.json", height=geometry.height, width=geometry.width
        ),
        element_bytes=_ELEMENT_BYTES,
    )
    formula = chunk_exchange(counts, ulysses_degree, _TRIMMED)
    model_ms = sum(part_ms(timing, *_MODEL_PARTS) for timing in timings)
    return {
        "ulysses_degree": ulysses_degree,
        "chunks": counted,
        "chunk_ms": statistics.median(part_ms(timing, *PARTS) for timing in timings),
        "exchanges_per_chunk": whole.calls / counted,
        "exchanges_per_chunk_formula": formula.calls,
        "sent_bytes_per_chunk": whole.sent_bytes / counted,
        "sent_bytes_per_chunk_formula": formula.total_bytes,
        "exchange_ms_per_chunk": whole.host_ms / counted,
        "exchange_share_of_transformer_time": whole.host_ms / model_ms,
    }


def _chunk(executor: MultiprocExecutor, index: int) -> ChunkTimings:
    return executor.run_chunk(ChunkPlan(_SESSION, index), lambda _: None)


def _difference(after: TrafficKind, before: TrafficKind) -> TrafficKind:
    return TrafficKind(
        calls=after.calls - before.calls,
        sent_bytes=after.sent_bytes - before.sent_bytes,
        host_ms=after.host_ms - before.host_ms,
    )
