"""The version, where users of the public package look for it."""

from vllm_omni import __version__, __version_tuple__

__all__ = ["__version__", "__version_tuple__"]
