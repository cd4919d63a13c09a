"""Platforms: the kinds of device that a process can run on, chosen by name at start-up."""

from importlib import import_module

from vllm_omni.envs import detect_platform
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Platform

__all__ = ["Platform", "create_platform"]

_PLATFORMS = {
    "cpu": ("vllm_omni.platforms.cpu", "CpuPlatform"),
    "cuda": ("vllm_omni.platforms.cuda", "CudaPlatform"),
    "npu": ("vllm_omni.platforms.npu", "NpuPlatform"),
}


def create_platform(name: str) -> Platform:
    """Import and make the platform called ``name``.

    Raises:
        ConfigError: if there is no such platform, or its libraries are missing.
    """
    if name not in _PLATFORMS:
        raise ConfigError(f"device must be one of {', '.join(_PLATFORMS)}, got {name!r}")
    module, attribute = _PLATFORMS[name]
    return getattr(import_module(module), attribute)()


def __getattr__(name: str) -> Platform:
    """``current_omni_platform``, the name of the public package: what this machine has."""
    if name != "current_omni_platform":
        raise AttributeError(f"module 'vllm_omni.platforms' has no attribute {name!r}")
    return create_platform(detect_platform())
