"""A checkpoint with all its files and without weights, for code that loads none."""

import json
import shutil
from pathlib import Path

from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR

_SMALL_FILES = (
    "vae/config.json",
    "text_encoder/config.json",
    "scheduler/scheduler_config.json",
)
_WEIGHTS = (
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
)
_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def write_fake_checkpoint(
    directory: Path, *, heads: object = 4, class_name: str = "LingBotWorldCausalDMDPipeline"
) -> Path:
    """Write every file that is looked for before a model is loaded."""
    for part in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler"):
        (directory / part).mkdir(parents=True)
    for file in _SMALL_FILES:
        (directory / file).write_text("{}")
    shutil.copy(TEMPLATE_DIR / "tokenizer/tokenizer.json", directory / "tokenizer")
    for file in _WEIGHTS:
        (directory / file).write_bytes(_NO_TENSORS)
    (directory / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    (directory / "transformer" / "config.json").write_text(
        json.dumps({"num_attention_heads": heads})
    )
    return directory
