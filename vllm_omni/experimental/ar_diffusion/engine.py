"""The import path by which deploy files name the engine."""

from vllm_omni.engine.engine import Engine as ARDiffusionEngine

__all__ = ["ARDiffusionEngine"]
