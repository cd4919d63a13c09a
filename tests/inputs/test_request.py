"""The request validator: every rule, with the numbers its error texts must hold."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.requests import PICTURE, PROMPT, parse, policy, refused, with_image
from vllm_omni.diffusion.messages import LiveCamera, OutputKind, ScriptedKeys
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import MAX_PROMPT_CHARS, normalise_prompt

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


# --- a whole request ------------------------------------------------------------------------------


def test_a_request_with_everything():
    request = parse(
        prompt=PROMPT | {"negative_prompt": "blurry", "additional_information": None},
        num_frames=21,
        seed=7,
        fps=24,
        output_type="latent",
        num_inference_steps=4,
        max_sequence_length=512,
        guidance_scale=3.5,
        generator_device="cpu",
        extra_args={"flow_shift": 3, "camera_action_script": [[["W"], ["w", "D"], []]] * 2},
    )
    assert request.prompt.text == "A quiet harbour."
    assert (request.height, request.width, request.num_chunks) == (64, 96, 2)
    assert (request.seed, request.fps, request.flow_shift) == (7, 24.0, 3.0)
    assert request.output is OutputKind.LATENT
    assert request.generator_device == "cpu"
    chunk = (frozenset("w"), frozenset("wd"), frozenset())
    assert request.camera == ScriptedKeys((chunk, chunk))
    assert np.array_equal(request.image.rgb, np.array(PICTURE))


def test_defaults():
    request = parse()
    assert isinstance(request.camera, LiveCamera)
    assert request.output is OutputKind.UINT8
    assert (request.fps, request.flow_shift, request.generator_device) == (16.0, None, None)


def test_a_seed_is_drawn_where_none_is_given():
    seeds = {parse().seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize(
    ("output_type", "kind"),
    [
        (None, OutputKind.FLOAT),
        ("np", OutputKind.FLOAT),
        ("pil", OutputKind.UINT8),
        ("latent", OutputKind.LATENT),
    ],
)
def test_output_types_of_an_engine_that_collects_clips(output_type, kind):
    clips = policy(array_output=OutputKind.FLOAT)
    assert parse(policy=clips, output_type=output_type).output is kind


def test_the_deployments_defaults_fill_what_is_left_out():
    defaults = {"num_frames": 21, "seed": 5, "fps": 12.0, "output_type": "latent",
                "generator_device": "cpu", "extra_args": {"flow_shift": 2.0}}  # fmt: skip
    told = policy(defaults=defaults)
    request = parse(policy=told, num_frames=1)
    assert (request.num_chunks, request.seed, request.fps) == (2, 5, 12.0)
    assert (request.output, request.generator_device) == (OutputKind.LATENT, "cpu")
    assert request.flow_shift == 2.0
    script = {"camera_action_script": [[[], [], []]]}
    asked = parse(policy=told, num_frames=9, seed=6, fps=24, output_type="np",
                  generator_device="npu", extra_args=script)  # fmt: skip
    assert (asked.num_chunks, asked.seed, asked.fps) == (1, 6, 24.0)
    assert (asked.output, asked.generator_device) == (OutputKind.UINT8, "npu")
    assert asked.flow_shift == 2.0
    assert isinstance(asked.camera, ScriptedKeys)
    assert parse(policy=told, num_frames=None, unbounded=True).num_chunks is None
    refused("must be at least 1, got 0", "fps", policy=policy(defaults={"fps": 0}))


# --- prompt ---------------------------------------------------------------------------------------


def test_whitespace_becomes_single_spaces():
    assert normalise_prompt("  a\tb \n\n c\u3000d ") == "a b c d"


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_normalising_a_prompt_again_changes_nothing(text):
    try:
        once = normalise_prompt(text)
    except ValueError:
        assert not text.strip()
        return
    assert once == " ".join(text.strip().split())
    assert normalise_prompt(once) == once


@pytest.mark.parametrize(
    ("prompt", "field", "match"),
    [
        ("a harbour", "prompt", 'must be .*multi_modal_data.*got "a harbour"'),
        ([7], "prompt", r"got \[7\]"),
        (7, "prompt", "got 7"),
        ({}, "prompt", "is required"),
        (PROMPT | {"prompt": None}, "prompt", "is required"),
        (PROMPT | {"prompt": ["a"]}, "prompt", r"must be a string, got \[\"a\"\]"),
        (PROMPT | {"prompt": ""}, "prompt", "must not be blank"),
        (PROMPT | {"prompt": " \n\t"}, "prompt", "must not be blank"),
        (PROMPT | {"prompt": "a\ud800"}, "prompt", "surrogate"),
        (PROMPT | {"promt": "a"}, None, "unknown key 'promt'; did you mean 'prompt'"),
        (PROMPT | {7: "a"}, None, "unknown key '7'; known are"),
        ({"prompt": "a"}, "multi_modal_data.image", "is required: the first picture"),
        ({"prompt": "a", "multi_modal_data": []}, "multi_modal_data", r"got \[\]"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data.image", "required"),
        (with_image(None), "multi_modal_data.image", "required"),
        (with_image([PICTURE]), "multi_modal_data.image", "one picture, got a list of 1"),
        (
            {"prompt": "a", "multi_modal_data": {"image": PICTURE, "video": 1}},
            "multi_modal_data",
            "unknown key 'video'",
        ),
        (
            PROMPT | {"additional_information": {"action_path": "walk"}},
            "additional_information.action_path",
            "extra_args.action_path",
        ),
        (PROMPT | {"additional_information": {"x": 1}}, "additional_information.x", "unknown key"),
    ],
)
def test_prompts_that_are_refused(prompt, field, match):
    refused(match, field, prompt=prompt)


def test_an_unreadable_picture_is_refused_without_its_path(tmp_path):
    path = tmp_path / "private-name.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(InvalidRequestError, match=r"damaged|decoded") as caught:
        parse(prompt=with_image(str(path)))
    assert "private-name" not in str(caught.value)


# --- everything else ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_args", "field", "match"),
    [
        ([], "extra_args", r"must be a mapping of names to values, got \[\]"),
        ({"flow_shfit": 3}, "extra_args", "'flow_shfit'; did you mean 'flow_shift'"),
        ({"volume": 3}, "extra_args", "known are action_path, camera_action_script, flow_shift"),
        ({"x" * 5000: 3}, "extra_args", "unknown key 'xxx"),
        ({"ar_diffusion_tick": {}}, "extra_args", "ar_diffusion_tick is of the tick protocol"),
        ({"session_id": "a"}, "extra_args", "session_id is of the tick protocol"),
        ({"flow_shift": True}, "extra_args.flow_shift", "must be a number, got true"),
        ({"flow_shift": "5"}, "extra_args.flow_shift", 'must be a number, got "5"'),
        ({"flow_shift": 0}, "extra_args.flow_shift", "must be above 0, got 0"),
        ({"flow_shift": float("nan")}, "extra_args.flow_shift", "got NaN"),
        ({"flow_shift": float("inf")}, "extra_args.flow_shift", "got Infinity"),
        ({"flow_shift": 10**400}, "extra_args.flow_shift", "must be a number, got 1000"),
    ],
)
def test_extra_args_that_are_refused(extra_args, field, match):
    refused(match, field, extra_args=extra_args)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("num_inference_steps", 5, "must be 4, got 5"),
        ("num_inference_steps", True, "must be an integer, got true"),
        ("num_inference_steps", "4", 'must be an integer, got "4"'),
        ("max_sequence_length", 226, "must be 512, got 226"),
        ("num_outputs_per_prompt", 2, "must be 1, got 2"),
        ("num_outputs_per_prompt", 0, "must be at least 1, got 0"),
        ("latents", np.zeros(3), "noise is drawn from seed"),
        ("generator", [object()], "give seed"),
        ("seed", 1.5, "must be an integer, got 1.5"),
        ("seed", [1, 2], r"must be an integer, got \[1, 2\]"),
        ("seed", True, "must be an integer, got true"),
        ("seed", 2**63, "must be at most 9223372036854775807, got 9223372036854775808"),
        ("fps", 0.5, "must be at least 1, got 0.5"),
        ("fps", -1.0, "got -1.0"),
        ("fps", 1001, "got 1001"),
        ("fps", True, "must be a number, got true"),
        ("fps", "16", 'must be a number, got "16"'),
        ("output_type", "mp4", 'must be pil, np or latent, got "mp4"'),
        ("output_type", ["np"], r'got \["np"\]'),
        ("generator_device", "tpu", "must be cpu, cuda or npu, got .tpu"),
        ("generator_device", "cuda:x", "got 'cuda:x'"),
        ("generator_device", 0, "must be a string, got 0"),
    ],
)
def test_parameters_that_are_refused(name, value, match):
    refused(match, name, **{name: value})


def test_long_prompts_pass_up_to_a_bound_that_no_tokenizer_fears():
    """Truncation at 512 tokens belongs to the tokenizer."""
    words = "word " * (MAX_PROMPT_CHARS // 5)
    assert parse(prompt=PROMPT | {"prompt": words}).prompt.text == words.strip()
    refused("must have at most 32768 characters", "prompt", prompt=PROMPT | {"prompt": words * 2})


def test_cheap_checks_come_before_the_picture_and_the_path(tmp_path):
    missing = with_image(str(tmp_path / "missing.png"))
    refused("got 10", "num_frames", prompt=missing, num_frames=10)
    refused("got 0", "fps", prompt=missing, fps=0, extra_args={"action_path": "nowhere"},
            policy=policy(action_root=str(tmp_path)))  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_validation_loads_no_torch():
    code = (
        "import sys\n"
        "from tests.helpers.requests import parse\n"
        "parse()\n"
        "import vllm_omni.engine.interactions, vllm_omni.outputs, vllm_omni.model_extras\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
