"""Real-time serving of the LingBot-World v2 interactive world model.

Importing the package is cheap: its names are resolved on first use, so that ``vllm-omni --help``
and the API process start without torch, and a server hears signals soon.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.entrypoints import AsyncOmni, Omni
    from vllm_omni.version import __version__, __version_tuple__

__all__ = ["AsyncOmni", "Omni", "__version__", "__version_tuple__"]

_PLACES = {"AsyncOmni": "entrypoints", "Omni": "entrypoints"} | dict.fromkeys(
    ("__version__", "__version_tuple__"), "version"
)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'vllm_omni' has no attribute {name!r}")
    return getattr(import_module(f"vllm_omni.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
