"""Model class names and where their loaders are, imported lazily."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Dotted place of one model's entrance.

    Attributes:
        loader: makes the pipeline of one rank.
    """

    loader: str

    def load_loader(self) -> Callable[..., Any]:
        """Import and return the pipeline loader."""
        return _resolve(self.loader)


_MODELS = {
    "LingBotWorldCausalDMDPipeline": ModelEntry(
        loader="vllm_omni.diffusion.models.lingbot_world.load:load_pipeline",
    )
}


def model_entry(class_name: str) -> ModelEntry:
    """Entry of a model class.

    Raises:
        ConfigError: if the class is not known.
    """
    if class_name not in _MODELS:
        raise ConfigError(f"model class must be one of {', '.join(_MODELS)}, got {class_name!r}")
    return _MODELS[class_name]


def _resolve(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return vars(import_module(module))[name]
