"""Where the checkpoint of a model is on this machine."""

import re
from pathlib import Path

from vllm_omni.errors import ConfigError
from vllm_omni.system_errors import expand_home, reason

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
