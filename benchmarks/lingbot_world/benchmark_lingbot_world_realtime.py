"""The live benchmark by its path in a checkout; ``vllm-omni bench`` is the same program.

    python benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py --port 8000 --num-chunks 16

Exit codes: 0 all sessions complete, 1 a session failed, 2 bad flags.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_omni.benchmarks.metrics import (
    aggregate_metrics,
    compute_metrics,
    percentile,
    simulate_playback,
)
from vllm_omni.benchmarks.realtime import main, parse_args
from vllm_omni.benchmarks.session import (
    BenchmarkError,
    SessionOptions,
    endpoint_url,
    run_session,
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

if __name__ == "__main__":
    sys.exit(main())
