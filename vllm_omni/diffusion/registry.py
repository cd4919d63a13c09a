"""The models of this package: one entry each, which is all that the rest knows of a model.

Entries are data. What they name is imported when it is needed: the parts that run in the server
load no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.errors import ConfigError
from vllm_omni.inputs.request import RequestLimits


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model.

    Attributes:
        class_name: of ``model_index.json``, and of ``model_class_name`` in deploy files.
        pipeline: name of ``pipeline`` in deploy files.
        limits: what it makes of a request.
        modalities: what an interaction may change: ``prompt``, ``camera``.
        picture: place of the function that decodes a first picture; loads no torch.
        loader: place of the function that makes the pipeline of one rank.
        preload: modules that worker processes can share if they are loaded once, before the fork.
    """

    class_name: str
    pipeline: str
    limits: RequestLimits
    modalities: tuple[str, ...]
    picture: str
    loader: str
    preload: tuple[str, ...] = ()

    def load_loader(self) -> Callable[..., Any]:
        """Import the pipeline loader."""
        return _imported(self.loader)

    def prepare_picture(self, source: object) -> SourceImage:
        """Decode a first picture.

        Raises:
            InvalidRequestError: if it is none.
        """
        return _imported(self.picture)(source)


LINGBOT_WORLD = ModelEntry(
    class_name="LingBotWorldCausalDMDPipeline",
    pipeline="lingbot_world",
    limits=RequestLimits(
        inference_steps=4, max_sequence_length=512, native_fps=16.0, area=480 * 832
    ),
    modalities=("prompt", "camera"),
    picture="vllm_omni.inputs.picture:load_image",
    loader="vllm_omni.diffusion.models.lingbot_world.load:load_pipeline",
    preload=("vllm_omni.diffusion.models.lingbot_world.load",),
)
_MODELS = {entry.class_name: entry for entry in (LINGBOT_WORLD,)}


def model_entry(class_name: str) -> ModelEntry:
    """Entry of a model class.

    Raises:
        ConfigError: if the class is not known.
    """
    if class_name not in _MODELS:
        raise ConfigError(f"model class must be one of {', '.join(_MODELS)}, got {class_name!r}")
    return _MODELS[class_name]


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
