"""The parameters of the Python API: their defaults and what Python itself refuses."""

import pytest

from vllm_omni.inputs.data import (
    OmniDiffusionSamplingParams,
    OmniInteractionEvent,
    OmniInteractionPrompt,
    OmniTextPrompt,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def test_defaults_are_not_shared():
    first, second = OmniDiffusionSamplingParams(), OmniDiffusionSamplingParams()
    first.extra_args["flow_shift"] = 3.0
    assert second.extra_args == {}
    assert (second.num_frames, second.num_outputs_per_prompt) == (1, 1)


def test_unknown_names_are_errors():
    with pytest.raises(TypeError, match="num_frame"):
        OmniDiffusionSamplingParams(num_frame=9)
    with pytest.raises(AttributeError):
        OmniDiffusionSamplingParams().num_frame = 9


def test_prompts_are_plain_mappings():
    prompt = OmniTextPrompt(prompt="a", multi_modal_data={"image": "a.png"})
    assert prompt == {"prompt": "a", "multi_modal_data": {"image": "a.png"}}
    event = OmniInteractionEvent(event=OmniInteractionPrompt(prompt="b"), transition_chunks=0)
    assert event == {"event": {"prompt": "b"}, "transition_chunks": 0}
    assert OmniTextPrompt.__required_keys__ == {"prompt"}
