"""Prompts, interactions and sampling parameters of the Python API, and the request they stand for.

:mod:`vllm_omni.inputs.request` checks the values, as it does those of the server's clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NotRequired, TypedDict

from pydantic import ConfigDict

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import Checked, validate
from vllm_omni.wording import shown


class OmniTextPrompt(TypedDict):
    """What a world starts from.

    ``multi_modal_data`` holds one ``image``: a path, encoded bytes, a ``data:`` URL, a PIL image,
    a numpy array [H, W, 3] or a tensor [3, H, W]. ``negative_prompt`` has no effect.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, object]]
    negative_prompt: NotRequired[str | None]
    additional_information: NotRequired[Mapping[str, object] | None]


class OmniInteractionPrompt(TypedDict, total=False):
    """What an interaction changes: the prompt, the camera, or both."""

    prompt: str | None
    multi_modal_data: Mapping[str, object] | None


class OmniInteractionEvent(TypedDict, total=False):
    """One interaction. ``event`` is required; an id is made where none is given.

    ``transition_chunks`` is how many chunks the change takes; 0 switches at once.
    """

    event_id: str | None
    event: OmniInteractionPrompt
    transition_chunks: int | None


@dataclass(slots=True)
class OmniDiffusionSamplingParams:
    """How a rollout is made. An unknown keyword argument is a TypeError.

    Attributes:
        height: pixels, a multiple of 16; both sides or neither.
        width: as ``height``.
        num_frames: pixel frames, 9 + 12k.
        num_inference_steps: ``None`` or 4.
        max_sequence_length: ``None`` or 512 prompt tokens.
        seed: ``None`` draws one.
        generator: must stay ``None``; give ``seed``.
        generator_device: where noise is drawn, ``None`` for the model's device.
        fps: playback rate and time base of interactions; ``None`` for the model's 16, at which a
            chunk plays 750 ms.
        output_type: "np", "pil", "latent", or ``None`` for "np".
        latents: must stay ``None``.
        extra_args: ``flow_shift``, ``action_path``, ``camera_action_script``.
        guidance_scale: no effect, as are all guidance settings: the model is distilled.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = 1
    num_inference_steps: int | None = None
    max_sequence_length: int | None = None
    seed: int | None = None
    generator: object | None = None
    generator_device: str | None = None
    fps: float | int | None = None
    output_type: str | None = None
    num_outputs_per_prompt: int = 1
    latents: object | None = None
    guidance_scale: float | int | None = None
    guidance_scale_2: float | int | None = None
    true_cfg_scale: float | int | None = None
    boundary_ratio: float | int | None = None
    quality: str | None = None
    extra_args: dict[str, object] = field(default_factory=dict)


OmniPromptType = str | OmniTextPrompt
"""What ``generate`` takes as a prompt; a name that users of the public package import."""
OmniSamplingParams = OmniDiffusionSamplingParams
"""Another such name; there is one kind of parameters."""


NAMES = {"image": "multi_modal_data.image"}
"""Fields of a request that the Python API knows by another name."""
_NOT_FOR_THIS_MODEL = {
    "latents": "must not be given; noise is drawn from seed",
    "generator": "must not be given; give seed",
}


class _Media(Checked):
    model_config = ConfigDict(strict=False)

    image: object = None


class _Prompt(Checked):
    model_config = ConfigDict(strict=False)

    prompt: object = None
    multi_modal_data: _Media | None = None
    negative_prompt: object = None
    additional_information: dict[str, object] | None = None


def rollout_fields(prompt: object, params: OmniDiffusionSamplingParams) -> dict[str, object]:
    """Spread a prompt and its parameters over the fields of a request; values are not checked.

    Raises:
        InvalidRequestError: if the prompt is no mapping, or has a key that means nothing here.
    """
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            'must be {"prompt": text, "multi_modal_data": {"image": picture}}, got '
            f"{shown(prompt)}",
            field="prompt",
        )
    given = validate(_Prompt, prompt)
    _refuse_additional(given.additional_information or {})
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    for name, words in _NOT_FOR_THIS_MODEL.items():
        if values.pop(name) is not None:
            raise InvalidRequestError(words, field=name)
    image = None if given.multi_modal_data is None else given.multi_modal_data.image
    return {
        **values,
        "prompt": given.prompt,
        "negative_prompt": given.negative_prompt,
        "image": image,
    }


def _refuse_additional(given: Mapping[str, object]) -> None:
    for name in given:
        words = "unknown key; nothing is read from here"
        if name == "action_path":
            words = "give the path as sampling parameter extra_args.action_path"
        raise InvalidRequestError(words, field=f"additional_information.{name:.100}")
