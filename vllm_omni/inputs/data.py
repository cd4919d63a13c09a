"""Prompts, interactions and sampling parameters of the Python API; nothing is checked here.

:mod:`vllm_omni.inputs.request` checks them, as it does the requests of the server's clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict


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
        fps: playback rate and time base of interactions.
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
