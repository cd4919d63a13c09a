"""LingBot-World: names are resolved on first use, so importing the package loads no torch."""

from importlib import import_module

_EXPORTS = {
    "CausalLingBotWorldTransformer3DModel": "transformer",
    "LingBotWorldCausalDMDPipeline": "pipeline",
    "LingBotWorldConfig": "config",
    "WanVAE": "vae.vae",
}


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_EXPORTS[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    """Exported names beside those already loaded."""
    return sorted({*globals(), *_EXPORTS})
