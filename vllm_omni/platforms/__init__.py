"""Platforms: the kinds of device that a process can run on, chosen by name at start-up, and what
compiling for them needs of the machine.
"""

import shutil
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from vllm_omni import envs
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import Platform

__all__ = ["Platform", "create_platform", "missing_for_compiling"]

_COMPILERS = ("gcc", "clang")

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


def missing_for_compiling(device: str) -> tuple[str, ...]:
    """Name what ``torch.compile`` would miss on this machine, in the operator's words.

    Triton builds the launcher of each kernel with a C compiler against Python's headers.
    """
    chosen = envs.c_compiler()
    headers = Path(sysconfig.get_paths()["include"])
    found = {
        f"a C compiler ({' or '.join(_COMPILERS) if chosen is None else f'CC={chosen}'})": any(
            map(shutil.which, _COMPILERS if chosen is None else (chosen,))
        ),
        f"Python.h (in {headers})": (headers / "Python.h").is_file(),
    }
    if device == "cuda":
        found["the package triton"] = find_spec("triton") is not None
    return tuple(name for name, is_here in found.items() if not is_here)


def __getattr__(name: str) -> Platform:
    """``current_omni_platform``, the name of the public package: what this machine has."""
    if name != "current_omni_platform":
        raise AttributeError(f"module 'vllm_omni.platforms' has no attribute {name!r}")
    return create_platform(envs.detect_platform())
