"""Where a model's checkpoint is on this machine, and what its small files say about it."""

import json
import re
from pathlib import Path

from vllm_omni.errors import CheckpointError, ConfigError
from vllm_omni.system_errors import expand_home, reason, refuse_special

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOY_WORLD = "toy_world"
"""Name of the one checkpoint that the package brings."""


def require_model(model: str) -> None:
    """Refuse a model name that is missing, blank or not UTF-8.

    Raises:
        ConfigError: always the same text, whatever else is wrong.
    """
    if not model.strip():
        raise ConfigError(
            "no model given: name a checkpoint directory or a hub id; the deploy config is not a "
            "model source"
        )
    try:
        model.encode()
    except UnicodeEncodeError:
        # The libraries that read the files cannot take such a name.
        raise ConfigError(f"model {model!r}: its path must be UTF-8; rename it") from None


def find_checkpoint(model: str) -> Path:
    """Directory of a model given as a path, as a hub id that is in the local cache, or by name.

    The only name is that of the trained toy world in this package; a directory of that name at the
    current one comes first.

    Raises:
        ConfigError: if ``model`` is blank or nothing of that name is on this machine.
    """
    require_model(model)
    try:
        return _found(model)
    except OSError as error:
        raise ConfigError(f"model {model!r} cannot be read: {reason(error)}") from None


def _found(model: str) -> Path:
    path = expand_home(model)
    if path.is_dir():
        return path
    if model == _TOY_WORLD:
        return Path(__file__).resolve().parents[1] / "data" / _TOY_WORLD
    if path.exists() or _HUB_ID.fullmatch(model) is None:
        raise ConfigError(f"model {model!r} is not a directory (looked for at {path.absolute()})")
    return _from_hub_cache(model)


def _from_hub_cache(model: str) -> Path:
    # Only a hub id needs the library, whose import takes longer than the rest of resolution.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"model {model!r}: no such directory: {Path(model).absolute()}; nor is it a hub id in "
            "the local cache. Nothing is downloaded at run time; if it is a hub id, fetch it first "
            f"with `hf download {model}`"
        ) from None


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
