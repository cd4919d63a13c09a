"""Counts what the coders of a VAE take of memory, without a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, TEMPORAL_FACTOR
from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS, VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE


@dataclass(frozen=True, slots=True)
class CoderBytes:
    """What an encoder or decoder takes for frames, or a rank's columns, of one size.

    Attributes:
        state: bytes of a session's history.
        activations: what its layers take at most, history apart. The count is of tensors: what a
            convolution takes inside comes on top.
    """

    state: int
    activations: int


@cache
def decoder_bytes(config: VaeConfig, dtype: torch.dtype, height: int, width: int) -> CoderBytes:
    """Count the bytes of a decoder for frames of ``height`` x ``width`` pixels."""
    with torch.device("meta"), torch.inference_mode():
        shadow = _shadow(config, dtype)
        latents = torch.empty(config.z_dim, 1, height // SPATIAL_FACTOR, width // SPATIAL_FACTOR)
        _, state = shadow.decode(latents, DecoderState())  # its frame is one pixel frame
        with _LivePeak() as live:
            _, state = shadow.decode(latents, state)
        return CoderBytes(state.bytes(), live.peak_bytes - state.bytes())


@cache
def encoder_bytes(config: VaeConfig, dtype: torch.dtype, height: int, width: int) -> CoderBytes:
    """Count the bytes of an encoder for frames of ``height`` x ``width`` pixels."""
    with torch.device("meta"), torch.inference_mode():
        shadow = _shadow(config, dtype)
        _, state = shadow.encode(torch.empty(COLOURS, 1, height, width), EncoderState())
        pixels = torch.empty(COLOURS, 1, 1, 1).expand(COLOURS, TEMPORAL_FACTOR, height, width)
        with _LivePeak() as live:
            _, state = shadow.encode(pixels, state)
        return CoderBytes(state.bytes(), live.peak_bytes - state.bytes())


def _shadow(config: VaeConfig, dtype: torch.dtype) -> WanVAE:
    """Make the same network without memory; call it under the meta device."""
    shadow = WanVAE(config).to(dtype)
    shadow.prepare()
    return shadow


class _LivePeak(TorchDispatchMode):
    """Watches the tensors that are made in its block; what a kernel takes inside is not seen.

    Attributes:
        peak_bytes: most bytes that they held at once so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, then count what is alive."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {at: kept for at, kept in self._alive.items() if not kept[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return made
