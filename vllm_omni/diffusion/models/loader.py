"""Reads safetensors shards straight into parameters: no second copy of the model in memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_omni.diffusion.distributed.parallel_state import is_root
from vllm_omni.diffusion.layers.weights import WeightTarget
from vllm_omni.diffusion.models.checkpoint_files import (
    DIFFUSERS,
    reading,
    weight_files,
)
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_NAMES_SHOWN = 20


@contextmanager
def no_weights() -> Iterator[None]:
    """Build modules on the meta device: shapes and dtypes, no memory."""
    with torch.device("meta"):
        yield


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters made under :func:`no_weights` uninitialised memory on ``device``."""
    module.to_empty(device=device)
    module.requires_grad_(requires_grad=False)
    module.eval()


def load_weights(directory: Path, targets: Mapping[str, WeightTarget]) -> None:
    """Fill every target from the shards of ``directory``.

    Names and shapes of all shards are compared before any value is read. The root rank logs each
    file that it begins.

    Raises:
        CheckpointError: naming all missing, unexpected and mis-shaped tensors at once.
    """
    files = weight_files(directory, DIFFUSERS)
    _check_names(directory.name, files, targets)
    for number, file in enumerate(files, 1):
        if is_root():
            logger.info("loading %s: file %d of %d", directory.name, number, len(files))
        with reading(file), safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                target = targets[name]
                target.store(shard.get_slice(name)[target.local_slices()])


def _check_names(
    component: str, files: tuple[Path, ...], targets: Mapping[str, WeightTarget]
) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with reading(file), safe_open(file, framework="pt") as shard:
                found.update(
                    (name, tuple(shard.get_slice(name).get_shape()))
                    for name in shard.keys()  # noqa: SIM118 (not a mapping)
                )
        except SafetensorError as error:
            raise CheckpointError(f"{component}/{file.name} cannot be read: {error}") from error
    problems = [
        _listing("missing", [name for name in targets if name not in found]),
        _listing("unexpected", [name for name in found if name not in targets]),
        _listing(
            "mis-shaped",
            [
                f"{name} (expected {list(targets[name].shape)}, got {list(shape)})"
                for name, shape in found.items()
                if name in targets and targets[name].shape != shape
            ],
        ),
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise CheckpointError(f"{component} weights do not fit: {'; '.join(problems)}")


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} {what}: {', '.join(sorted(names)[:_NAMES_SHOWN])}{more}"
