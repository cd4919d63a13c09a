"""What a checkpoint says about itself, without loading it."""

import json
from pathlib import Path

from vllm_omni.errors import CheckpointError
from vllm_omni.system_errors import refuse_special


def get_model_class_name(model_path: str | Path) -> str:
    """Pipeline class that a local checkpoint names in its ``model_index.json``.

    Raises:
        CheckpointError: if the file is missing, unreadable or names none.
    """
    index = Path(model_path) / "model_index.json"
    try:
        refuse_special(index)
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: is not valid JSON ({error})") from error
    name = content.get("_class_name") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{index}: needs a string _class_name, got {name!r:.100}")
    return name
