"""The benchmark's workloads by their path in a checkout: :mod:`vllm_omni.benchmarks.workload`."""

from vllm_omni.benchmarks.workload import (
    PromptUpdate,
    Workload,
    WorkloadError,
    build_camera_script,
    chunks_for_frames,
    frames_for_chunks,
    image_url,
    load_workload,
    session_start,
)

__all__ = [
    "PromptUpdate",
    "Workload",
    "WorkloadError",
    "build_camera_script",
    "chunks_for_frames",
    "frames_for_chunks",
    "image_url",
    "load_workload",
    "session_start",
]
