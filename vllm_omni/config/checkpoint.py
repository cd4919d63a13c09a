"""What can be known about a checkpoint from its small JSON files, before any weight is read."""

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from vllm_omni.diffusion.registry import LINGBOT_WORLD
from vllm_omni.errors import CheckpointError, ConfigError
from vllm_omni.wording import problems


class _Transformer(BaseModel):
    """What is read of the transformer's configuration."""

    num_attention_heads: Annotated[int, Field(strict=True, ge=1)]


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def require_model(model: str) -> None:
    """Refuse a blank model.

    Raises:
        ConfigError: always the same text, whatever else is wrong.
    """
    if not model.strip():
        raise ConfigError(
            "no model given: name a checkpoint directory or a hub id; the deploy config is not a "
            "model source"
        )


def find_checkpoint(model: str) -> Path:
    """Directory of a model given as a path or as a hub id that is in the local cache.

    Raises:
        ConfigError: if ``model`` is blank or nothing of that name is on this machine.
    """
    require_model(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
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


def check_model_index(directory: Path) -> None:
    """Refuse a directory that does not hold this model.

    Raises:
        CheckpointError: if ``model_index.json`` is missing or names another class.
    """
    found = _read_json(directory / "model_index.json").get("_class_name")
    needed = LINGBOT_WORLD.class_name
    if found != needed:
        raise CheckpointError(
            f"{directory / 'model_index.json'}: _class_name must be {needed}, got {found!r}"
        )


def attention_heads(directory: Path) -> int:
    """Number of attention heads that the transformer's configuration states.

    Raises:
        CheckpointError: if the file is missing or the number is not a positive integer.
    """
    path = directory / "transformer" / "config.json"
    try:
        return _Transformer.model_validate(_read_json(path)).num_attention_heads
    except ValidationError as error:
        first = problems(error)[0]
        raise CheckpointError(f"{path}: {first.name}: {first.text}") from None


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content
