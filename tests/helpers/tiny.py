"""The tiny checkpoint, written once per test session and shared by all tests of the process."""

import tempfile
from functools import cache
from pathlib import Path

from vllm_omni.tools.tiny_checkpoint import write_tiny_checkpoint


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoint-")  # removed at interpreter exit


@cache
def tiny_checkpoint_dir() -> Path:
    """Directory of a freshly written tiny checkpoint. Treat it as read-only."""
    return write_tiny_checkpoint(Path(_scratch().name) / "tiny-lingbot-world")
