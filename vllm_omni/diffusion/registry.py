"""The models that can be served: one entry each, which is all that the rest knows of a model.

Entries are data. What they name is imported when it is needed; what runs in the server's process
loads no torch. A package outside of this one adds a model by an entry point of the group
``vllm_omni.models``, whose name is the class name and whose object is a :class:`ModelEntry`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.messages import SourceImage, TokenizedPrompt
from vllm_omni.errors import CheckpointError
from vllm_omni.inputs.request import RequestLimits
from vllm_omni.model_extras import get_model_class_name

ENTRY_POINT_GROUP = "vllm_omni.models"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model. Places are dotted: ``package.module:function``.

    Attributes:
        class_name: of ``model_index.json``, and of ``model_class_name`` in deploy files.
        pipeline: name of ``pipeline`` in deploy files.
        limits: what the model makes of a request.
        modalities: what an interaction may change: ``prompt``, ``camera``.
        checkpoint_check: place of the function that refuses a checkpoint directory, or parallel
            degrees that it does not run with, before a worker starts; loads no torch.
        picture: place of the function that decodes a first picture; loads no torch.
        loader: place of the function that makes the pipeline of one rank.
        tokenizer: place of the function that makes, of a checkpoint directory, the function that
            tokenizes prompts; loads no torch. ``None`` for a model that reads texts.
        preload: modules that worker processes share when they are loaded once, before the fork.
    """

    class_name: str
    pipeline: str
    limits: RequestLimits
    modalities: tuple[str, ...]
    checkpoint_check: str
    picture: str
    loader: str
    tokenizer: str | None = None
    preload: tuple[str, ...] = ()

    def check_checkpoint(self, directory: Path, parallel: DiffusionParallelConfig) -> None:
        """Refuse what cannot be loaded, as far as small files tell."""
        _imported(self.checkpoint_check)(directory, parallel)

    def prepare_picture(self, source: object) -> SourceImage:
        """Decode a first picture into the form that this model takes."""
        return _imported(self.picture)(source)

    def load_tokenizer(self, directory: Path) -> Callable[[str], TokenizedPrompt]:
        """Load what prompts are tokenized with. Any thread may call it; it takes milliseconds.

        Raises:
            CheckpointError: if the directory holds nothing that can be used.
        """
        return TokenizedPrompt if self.tokenizer is None else _imported(self.tokenizer)(directory)

    def load_loader(self) -> Callable[..., Any]:
        """Import the function that makes a pipeline."""
        return _imported(self.loader)


LINGBOT_WORLD = ModelEntry(
    class_name="LingBotWorldCausalDMDPipeline",
    pipeline="lingbot_world",
    limits=RequestLimits(
        inference_steps=4, max_sequence_length=512, native_fps=16.0, area=480 * 832
    ),
    modalities=("prompt", "camera"),
    checkpoint_check="vllm_omni.diffusion.models.lingbot_world.config:check_checkpoint",
    picture="vllm_omni.inputs.picture:load_image",
    loader="vllm_omni.diffusion.models.lingbot_world.load:load_pipeline",
    tokenizer="vllm_omni.diffusion.models.lingbot_world.tokenizer:load_tokenizer",
    preload=("vllm_omni.diffusion.models.lingbot_world.load",),
)
MODELS = {entry.class_name: entry for entry in (LINGBOT_WORLD,)}


def model_of(directory: Path, class_name: str | None = None) -> ModelEntry:
    """Entry of the model that a checkpoint directory holds.

    Args:
        class_name: what the deployment says that it holds; it wins over ``model_index.json``.

    Raises:
        CheckpointError: if its ``model_index.json`` cannot be read or names no known model.
    """
    class_name = class_name or get_model_class_name(directory)
    if class_name in MODELS:
        return MODELS[class_name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=class_name):
        return point.load()
    raise CheckpointError(
        f"{directory / 'model_index.json'}: _class_name must be {' or '.join(MODELS)}, got "
        f"{class_name!r:.100}"
    )


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
