"""The tiny checkpoint, written once per test session and shared by all tests of the process."""

import tempfile
from functools import cache
from pathlib import Path

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.diffusion.models.lingbot_world.tokenizer import PromptTokenizer, load_tokenizer
from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR, write_tiny_checkpoint


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoint-")  # removed at interpreter exit


@cache
def tiny_checkpoint_dir() -> Path:
    """Directory of a freshly written tiny checkpoint. Treat it as read-only."""
    return write_tiny_checkpoint(Path(_scratch().name) / "tiny-lingbot-world")


@cache
def _tokenizer() -> PromptTokenizer:
    return load_tokenizer(TEMPLATE_DIR)


def tiny_prompt(text: str) -> TokenizedPrompt:
    """A prompt as the tiny checkpoint reads it."""
    return _tokenizer()(text)


def tiny_config(executor: str = "inline", **changes: object) -> OmniDiffusionConfig:
    """Settings of a worker on the tiny checkpoint: eager float32 at 64x96 unless changed."""
    settings = {"dtype": "float32", "geometry": VideoGeometry(64, 96), **changes}
    return OmniDiffusionConfig(model=str(tiny_checkpoint_dir()), executor=executor, **settings)
