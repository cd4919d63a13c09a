"""Reads safetensors shards straight into parameters: no second copy of the model in memory."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_omni.diffusion.distributed.parallel_state import is_root
from vllm_omni.diffusion.layers.weights import WeightTarget
from vllm_omni.diffusion.models.checkpoint_files import DIFFUSERS, reading, weight_files
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_NAMES_SHOWN = 20
_GB = 1e9


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters made under the meta device uninitialised memory on ``device``."""
    module.to_empty(device=device)
    module.requires_grad_(requires_grad=False)
    module.eval()


def module_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


_told: ContextVar[Callable[[], None]] = ContextVar("told", default=lambda: None)
_TOLD_EVERY_S = 1.0
_LOGGED_EVERY_S = 10.0


@contextmanager
def loading_told(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` about once a second while weights arrive, in the block."""
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


@contextmanager
def telling() -> Iterator[None]:
    """Tell about once a second, in the block, that weights arrive.

    It is for a library that loads them and says nothing meanwhile; whether it hangs cannot be seen.
    Only the thread of this function tells in the block.
    """
    tell, ended = _told.get(), threading.Event()

    def tell_on() -> None:
        while not ended.wait(_TOLD_EVERY_S):
            tell()

    thread = threading.Thread(target=tell_on, name="vllm-omni-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class LoadProgress:
    """Tells how loading a component goes on: to whoever waits, and by the root in the log.

    Args:
        component: what is loaded.
        total_bytes: size of its files; a rank that takes its share of them ends earlier.
    """

    def __init__(self, component: str, total_bytes: int) -> None:
        self._component = component
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._started_s = self._told_s = self._logged_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self._loaded_bytes += num_bytes
        now_s = time.monotonic()
        if now_s - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now_s
            _told.get()()
        if now_s - self._logged_s >= _LOGGED_EVERY_S and is_root():
            self._logged_s = now_s
            rate = self._loaded_bytes / (now_s - self._started_s)
            logger.info(
                "loading %s: %.1f of %.1f GB at %.2f GB/s, about %.0f s to go",
                *(self._component, self._loaded_bytes / _GB, self._total_bytes / _GB, rate / _GB),
                max(0, self._total_bytes - self._loaded_bytes) / rate,
            )


def load_weights(directory: Path, targets: Mapping[str, WeightTarget]) -> None:
    """Fill every target from the shards of ``directory``.

    Names and shapes of all shards are compared before any value is read. The root rank logs each
    file that it begins.

    Raises:
        CheckpointError: naming all missing, unexpected and mis-shaped tensors at once.
    """
    files = weight_files(directory, DIFFUSERS)
    _check_names(directory.name, files, targets)
    progress = LoadProgress(directory.name, sum(file.stat().st_size for file in files))
    for number, file in enumerate(files, 1):
        if is_root():
            logger.info("loading %s: file %d of %d", directory.name, number, len(files))
        with reading(file), safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                values = shard.get_slice(name)[targets[name].local_slices()]
                targets[name].store(values)
                progress.add(values.nbytes)


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
