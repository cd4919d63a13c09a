"""Attention backends by name, imported only when chosen."""

from importlib import import_module

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.errors import ConfigError

_BACKENDS = {
    "flash": ("vllm_omni.diffusion.attention.backends.flash", "FlashAttention"),
    "npu_fusion": (
        "vllm_omni.diffusion.attention.backends.npu_fusion",
        "NpuFusionAttention",
    ),
    "reference": ("vllm_omni.diffusion.attention.backends.reference", "ReferenceAttention"),
    "sdpa": ("vllm_omni.diffusion.attention.backends.sdpa", "SdpaAttention"),
}


def create_attention_backend(name: str) -> AttentionBackend:
    """Make the backend called ``name``.

    Raises:
        ConfigError: if there is no such backend.
    """
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention backend must be one of {', '.join(_BACKENDS)}, got {name!r} "
            "(diffusion_attention_backend)"
        )
    module, attribute = _BACKENDS[name]
    return vars(import_module(module))[attribute]()
