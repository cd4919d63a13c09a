"""Real-time serving of the LingBot-World v2 interactive world model.

Importing the package is cheap: the public classes are resolved on first use, so that
``vllm-omni --help`` and the API process start without torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed_version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.entrypoints import AsyncOmni, Omni

__all__ = ["AsyncOmni", "Omni", "__version__", "__version_tuple__"]

try:
    __version__ = _installed_version("vllm-omni")
except PackageNotFoundError:  # running from a checkout that was never installed
    __version__ = "0.0.0"
__version_tuple__ = tuple(
    int(part) if part.isdigit() else part for part in __version__.replace("+", ".").split(".")
)

_LAZY = {"AsyncOmni", "Omni"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'vllm_omni' has no attribute {name!r}")
    return getattr(import_module("vllm_omni.entrypoints"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
