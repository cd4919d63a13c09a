"""The version, where users of the public package look for it."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "__version_tuple__"]

try:
    __version__ = version("vllm-omni")
except PackageNotFoundError:  # running from a checkout that was never installed
    __version__ = "0.0.0"
__version_tuple__ = tuple(
    int(part) if part.isdigit() else part for part in __version__.replace("+", ".").split(".")
)
