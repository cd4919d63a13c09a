"""The small JSON files of a checkpoint, for code that reads no weights."""

import json
from pathlib import Path


def write_fake_checkpoint(
    directory: Path, *, heads: object = 4, class_name: str = "LingBotWorldCausalDMDPipeline"
) -> Path:
    """Write ``model_index.json`` and ``transformer/config.json``."""
    (directory / "transformer").mkdir(parents=True)
    (directory / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    (directory / "transformer" / "config.json").write_text(
        json.dumps({"num_attention_heads": heads})
    )
    return directory
