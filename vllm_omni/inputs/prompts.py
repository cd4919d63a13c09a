"""Prompts and parameters of the Python API as values of a :class:`RolloutRequest`."""

from collections.abc import Mapping
from dataclasses import fields

from pydantic import ConfigDict

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import Checked, validate
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.wording import shown

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
