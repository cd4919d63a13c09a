"""Chooses by name what the linears of a model are made of: plain torch, or vLLM's layers.

A model is always written and built with the layers of :mod:`linear`. A backend may then put its
own in their place, layer by layer, under the same names and with the same weights.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers.linear import process_weights
from vllm_omni.errors import ConfigError


@runtime_checkable
class LinearBackend(Protocol):
    """Makes a model's linears ready to be loaded, and then to be used."""

    def install(self, module: nn.Module) -> None:
        """Put this backend's layers into ``module``, which has memory but no weights yet."""
        ...

    def process(self, module: nn.Module) -> None:
        """Rewrite the weights of all linears once, after the checkpoint has been read."""
        ...

    def release(self) -> None:
        """Free what outlives the modules, such as process groups; a second call does nothing."""
        ...


class NativeLinearBackend:
    """The layers as they were built."""

    def install(self, module: nn.Module) -> None:
        """Nothing to replace."""

    def process(self, module: nn.Module) -> None:
        """Let every method rewrite its weights."""
        process_weights(module)

    def release(self) -> None:
        """Nothing to free."""


NATIVE = NativeLinearBackend()
"""Plain torch; it has no state."""


def create_linear_backend(
    name: str,
    quantization: Mapping[str, object],
    *,
    checkpoint: Path,
    parallel: ParallelState,
    device: torch.device,
    dtype: torch.dtype,
) -> LinearBackend:
    """The backend called ``name``; on all ranks of a world together.

    Args:
        quantization: method and ignored layers of vLLM's linears, empty for none.
        checkpoint: directory of the component, where a method may keep its description.

    Raises:
        ConfigError: if vLLM cannot be imported, or does not know the quantisation.
    """
    if name == "native":
        return NATIVE
    try:
        module = import_module("vllm_omni.diffusion.layers.linear_vllm")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"linear_backend {name} needs vLLM, which cannot be imported: {error}. Install it, or "
            "leave linear_backend and quantization_config out. A build of torchvision, torchaudio "
            "or torchcodec for another torch is a common cause; nothing here needs them"
        ) from error
    return module.VllmLinearBackend(
        quantization, checkpoint=checkpoint, parallel=parallel, device=device, dtype=dtype
    )
