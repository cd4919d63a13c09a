"""What users call: Python API, command line, server.

The public classes are resolved on first use, so that the command line and the API process import
this package without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni

__all__ = ["AsyncOmni", "Omni"]

_LAZY = {"AsyncOmni": "vllm_omni.entrypoints.async_omni", "Omni": "vllm_omni.entrypoints.omni"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
