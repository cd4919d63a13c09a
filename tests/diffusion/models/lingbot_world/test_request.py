"""The request validator: every rule, with the numbers its error texts must hold."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import LiveCamera, OutputKind, RecordedCamera, ScriptedKeys
from vllm_omni.diffusion.models.lingbot_world.request import (
    MAX_CHUNKS,
    RequestPolicy,
    normalise_prompt,
    parse_request,
)
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

PICTURE = Image.new("RGB", (96, 64), (10, 20, 30))
PROMPT = {"prompt": "A quiet harbour.", "multi_modal_data": {"image": PICTURE}}
SIZE = {"height": 64, "width": 96}
IDLE_CHUNK = [[], [], []]


def parse(prompt=None, policy=None, unbounded=False, **values):
    """Set the values afterwards: a client's JSON does not respect the annotations."""
    params = OmniDiffusionSamplingParams(**SIZE, num_frames=9)
    for name, value in values.items():
        setattr(params, name, value)
    return parse_request(
        PROMPT if prompt is None else prompt,
        params,
        RequestPolicy() if policy is None else policy,
        unbounded=unbounded,
    )


def refused(match, field, **arguments):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        parse(**arguments)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "invalid_request"
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def with_image(source):
    return {"prompt": "A harbour.", "multi_modal_data": {"image": source}}


# --- a whole request ---------------------------------------------------------------------------


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
    assert request.prompt == "A quiet harbour."
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
    assert all(0 <= seed < 2**63 for seed in seeds)


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
    policy = RequestPolicy(array_output=OutputKind.FLOAT)
    assert parse(policy=policy, output_type=output_type).output is kind


def test_the_policy_of_an_engine(monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_LINGBOT_ACTION_ROOT", "/from/environment")
    geometry, parallel = VideoGeometry(64, 96), DiffusionParallelConfig(ulysses_degree=2)
    config = OmniDiffusionConfig(model="m", geometry=geometry, parallel=parallel, executor="mp")
    policy = RequestPolicy.of(config, allow_live_camera=False)
    assert policy.action_root == "/from/environment"
    assert (policy.geometry, policy.parallel, policy.allow_live_camera) == (
        geometry,
        parallel,
        False,
    )
    named = OmniDiffusionConfig(model="m", action_root="/from/deploy")
    assert RequestPolicy.of(named).action_root == "/from/deploy"


# --- prompt ------------------------------------------------------------------------------------


def test_whitespace_becomes_single_spaces():
    assert normalise_prompt("  a\tb \n\n c\u3000d ") == "a b c d"


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_normalising_a_prompt_again_changes_nothing(text):
    try:
        once = normalise_prompt(text)
    except InvalidRequestError:
        assert not text.strip()
        return
    assert once == " ".join(text.strip().split())
    assert normalise_prompt(once) == once


@pytest.mark.parametrize(
    ("prompt", "field", "match"),
    [
        ("a harbour", "prompt", "must be .*multi_modal_data.*got str"),
        ([PROMPT], "prompt", "got list"),
        (7, "prompt", "got int"),
        ({}, "prompt", "must be text, got nothing"),
        (PROMPT | {"prompt": None}, "prompt", "must be text, got nothing"),
        (PROMPT | {"prompt": ["a"]}, "prompt", "must be text, got list"),
        (PROMPT | {"prompt": ""}, "prompt", "must not be blank"),
        (PROMPT | {"prompt": " \n\t"}, "prompt", "must not be blank"),
        (PROMPT | {"prompt": "a\ud800"}, "prompt", "surrogate"),
        (PROMPT | {"promt": "a"}, "prompt", "unknown key 'promt'; did you mean 'prompt'"),
        (PROMPT | {7: "a"}, "prompt", "unknown key 7; known are"),
        ({"prompt": "a"}, "multi_modal_data", "needs an image, got nothing"),
        ({"prompt": "a", "multi_modal_data": []}, "multi_modal_data", "got list"),
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
        (PROMPT | {"additional_information": {"x": 1}}, "additional_information", "unknown key"),
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


# --- length ------------------------------------------------------------------------------------


@given(st.integers(0, MAX_CHUNKS - 1))
def test_nine_and_twelve_more_per_chunk(extra_chunks):
    assert parse(num_frames=9 + 12 * extra_chunks).num_chunks == 1 + extra_chunks


@given(st.integers(-100, 10**7).filter(lambda n: n < 9 or (n - 9) % 12))
def test_other_counts_are_refused_with_the_rule(num_frames):
    refused(f"9 \\+ 12k pixel frames .9, 21, 33, 45, ....*got {num_frames}$", "num_frames",
            num_frames=num_frames)  # fmt: skip


@pytest.mark.parametrize("num_frames", [0, -3, 1, 8, 10, 20, 22, 80])
def test_counts_near_a_legal_one_are_refused(num_frames):
    refused(f"got {num_frames}", "num_frames", num_frames=num_frames)


@pytest.mark.parametrize("num_frames", [9, 21, 81])
def test_legal_counts(num_frames):
    assert parse(num_frames=num_frames).num_chunks == (num_frames - 9) // 12 + 1


@pytest.mark.parametrize(
    ("num_frames", "match"),
    [
        ("21", "must be an integer, got '21'"),
        (21.0, "must be an integer, got 21.0"),
        (1e9, "must be an integer, got 1000000000.0"),
        (True, "must be an integer, got True"),
        (None, "must be an integer, got None"),
        (10**9, "at most 11999997 .* got 1000000000"),
        (9 + 12 * MAX_CHUNKS, "at most 11999997 .* got 12000009"),
        pytest.param(10**5000, "more than 20 digits", id="5000_digits"),
    ],
)
def test_counts_of_another_kind_or_too_large_are_refused(num_frames, match):
    refused(match, "num_frames", num_frames=num_frames)


def test_a_script_for_a_huge_clip_allocates_nothing():
    refused("needs 1000000 chunks for num_frames 11999997, got 1",
            "extra_args.camera_action_script", num_frames=9 + 12 * (MAX_CHUNKS - 1),
            extra_args={"camera_action_script": [IDLE_CHUNK]})  # fmt: skip


def test_the_policys_longest_rollout():
    policy = RequestPolicy(max_chunks=3)
    assert parse(policy=policy, num_frames=33).num_chunks == 3
    refused("at most 33 .* got 45", "num_frames", policy=policy, num_frames=45)


def test_unbounded_sessions():
    for num_frames in (None, 1):
        assert parse(unbounded=True, num_frames=num_frames).num_chunks is None
    refused("unbounded session, got 21", "num_frames", unbounded=True, num_frames=21)
    for name, value in (("action_path", "walk"), ("camera_action_script", [IDLE_CHUNK])):
        refused("fixed length", f"extra_args.{name}", unbounded=True, num_frames=None,
                extra_args={name: value})  # fmt: skip


# --- size --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1280, 720, (464, 832)),
        (720, 1280, (832, 464)),
        (1000, 1000, (624, 624)),
        (4000, 700, (256, 1504)),
    ],
)
def test_the_size_follows_the_shape_of_the_picture(width, height, expected):
    request = parse(prompt=with_image(Image.new("L", (width, height))), height=None, width=None)
    assert (request.height, request.width) == expected


def test_a_rotated_photograph_counts_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (1280, 720)).save(tmp_path / "a.jpg", exif=exif)
    request = parse(prompt=with_image(str(tmp_path / "a.jpg")), height=None, width=None)
    assert (request.height, request.width) == (832, 464)


def test_a_tensor_has_a_shape_too():
    array = np.full((720, 1280, 3), -0.5, np.float32)
    request = parse(prompt=with_image(array), height=None, width=None)
    assert (request.height, request.width) == (464, 832)
    assert request.image.rgb is None


@given(st.integers(1, 900), st.integers(1, 900))
def test_any_picture_gives_a_legal_size_or_advice(width, height):
    prompt = with_image(np.zeros((height, width, 3), np.uint8))
    longer = (480 * 832 * max(width / height, height / width)) ** 0.5
    if longer // 16 * 16 > 4096:
        refused(f"picture of {width}x{height} would make", "height", prompt=prompt, height=None,
                width=None)  # fmt: skip
        return
    request = parse(prompt=prompt, height=None, width=None)
    assert request.height % 16 == request.width % 16 == 0
    assert request.height * request.width <= 480 * 832 * 1.001


def test_the_configured_size_wins_over_the_pictures_and_the_requests_over_both():
    policy = RequestPolicy(geometry=VideoGeometry(96, 160))
    request = parse(policy=policy, height=None, width=None)
    assert (request.height, request.width) == (96, 160)
    request = parse(policy=policy, height=480, width=832)
    assert (request.height, request.width) == (480, 832)


@pytest.mark.parametrize(
    "size", [(480, 832), (352, 640), (480, 480), (192, 320), (832, 464), (720, 1280), (16, 4096)]
)
def test_any_multiple_of_16_is_legal(size):
    request = parse(height=size[0], width=size[1])
    assert (request.height, request.width) == size


@pytest.mark.parametrize(
    ("height", "width", "field", "match"),
    [
        (64, None, "width", "both height and width or neither, got height 64 and width None"),
        (None, 96, "height", "got height None and width 96"),
        (65, 96, "height", "multiple of 16 pixels, got 65"),
        (64, 100, "width", "multiple of 16 pixels, got 100"),
        (0, 96, "height", "got 0"),
        (64, -16, "width", "got -16"),
        ("64", 96, "height", "must be an integer, got '64'"),
        (64, 96.0, "width", "must be an integer, got 96.0"),
        (True, 96, "height", "must be an integer, got True"),
        (4112, 96, "height", "at most 4096 pixels, got 4112"),
        (64, 10**40, "width", "at most 4096 pixels, got an integer of more than 20 digits"),
    ],
)
def test_sizes_that_are_refused(height, width, field, match):
    refused(match, field, height=height, width=width)


def test_numpy_integers_are_integers():
    assert parse(height=np.int64(64), num_frames=np.int32(21)).num_chunks == 2


def test_sizes_that_the_ranks_cannot_share_are_refused_with_both_numbers():
    policy = RequestPolicy(parallel=DiffusionParallelConfig(ulysses_degree=2))
    assert parse(policy=policy, height=64, width=96).height == 64
    refused("240x240 has 225 tokens .*ulysses_degree 2", "height", policy=policy, height=240,
            width=240)  # fmt: skip
    refused("has 225 tokens", "height", policy=RequestPolicy(
        parallel=DiffusionParallelConfig(ulysses_degree=4)), height=240, width=240)  # fmt: skip


# --- camera ------------------------------------------------------------------------------------


def recorded(root, frames=21):
    (root / "walk").mkdir()
    np.save(root / "walk" / "poses.npy", np.tile(np.eye(4), (frames, 1, 1)))
    np.save(root / "walk" / "intrinsics.npy", np.full((frames, 4), 300.0))
    return RequestPolicy(action_root=str(root), allow_live_camera=False)


def test_a_recorded_path_has_a_pose_for_each_pixel_frame(tmp_path):
    policy = recorded(tmp_path)
    camera = parse(policy=policy, num_frames=21, extra_args={"action_path": "walk"}).camera
    assert isinstance(camera, RecordedCamera)
    assert camera.poses.shape == (21, 4, 4)
    refused("has 21 frames, num_frames 33", "extra_args.action_path", policy=policy,
            num_frames=33, extra_args={"action_path": "walk"})  # fmt: skip
    refused("leaves the trusted root", "extra_args.action_path", policy=policy,
            extra_args={"action_path": "../walk"})  # fmt: skip


@pytest.mark.parametrize(
    ("extra_args", "field", "match"),
    [
        ({"action_path": "walk"}, "extra_args.action_path", "lingbot_action_root"),
        ({"action_path": 7}, "extra_args.action_path", "must be text, got int"),
        (
            {"action_path": "a", "camera_action_script": [IDLE_CHUNK]},
            "extra_args.camera_action_script",
            "excludes extra_args.action_path",
        ),
        ({"camera_action_script": "w"}, "extra_args.camera_action_script", "list of chunks"),
        ({"camera_action_script": []}, "extra_args.camera_action_script", "1 chunks.*got 0"),
        (
            {"camera_action_script": [IDLE_CHUNK] * 2},
            "extra_args.camera_action_script",
            "needs 1 chunks for num_frames 9, got 2",
        ),
        (
            {"camera_action_script": [[[], []]]},
            "extra_args.camera_action_script",
            "chunk 0 needs 3 lists of keys, got 2",
        ),
        (
            {"camera_action_script": ["wad"]},
            "extra_args.camera_action_script",
            "chunk 0 needs 3 lists of keys, got str",
        ),
        (
            {"camera_action_script": [["w", [], []]]},
            "extra_args.camera_action_script",
            "chunk 0 needs lists of keys, got 'w'",
        ),
        (
            {"camera_action_script": [[[1], [], []]]},
            "extra_args.camera_action_script",
            r"chunk 0 needs lists of keys, got \[1\]",
        ),
        (
            {"camera_action_script": [[["q"], [], []]]},
            "extra_args.camera_action_script",
            "chunk 0: unknown camera key 'q'; keys are w a s d i j k l",
        ),
    ],
)
def test_cameras_that_are_refused(extra_args, field, match):
    refused(match, field, extra_args=extra_args)


@given(st.lists(st.lists(st.lists(st.sampled_from("wasdijklWASDIJKL"), max_size=9), min_size=3,
                         max_size=3), min_size=1, max_size=5))  # fmt: skip
def test_scripts_are_lowered_and_keep_their_order(script):
    camera = parse(
        num_frames=9 + 12 * (len(script) - 1), extra_args={"camera_action_script": script}
    ).camera
    assert [[set("".join(keys).lower()) for keys in chunk] for chunk in script] == [
        [set(keys) for keys in chunk] for chunk in camera.chunks
    ]


def test_a_live_camera_needs_a_stream():
    refused("action_path or camera_action_script", "extra_args",
            policy=RequestPolicy(allow_live_camera=False))  # fmt: skip


def test_absent_values_are_absent():
    extra_args = {"action_path": None, "camera_action_script": None, "flow_shift": None}
    assert isinstance(parse(extra_args=extra_args).camera, LiveCamera)
    assert isinstance(parse(extra_args=None).camera, LiveCamera)


# --- everything else ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_args", "field", "match"),
    [
        ([], "extra_args", "must be a mapping, got list"),
        ({"flow_shfit": 3}, "extra_args", "'flow_shfit'; did you mean 'flow_shift'"),
        ({"volume": 3}, "extra_args", "known are action_path, camera_action_script, flow_shift"),
        ({"x" * 5000: 3}, "extra_args", "unknown key 'xxx"),
        ({"ar_diffusion_tick": {}}, "extra_args.ar_diffusion_tick", "tick protocol"),
        ({"session_id": "a"}, "extra_args.session_id", "tick protocol"),
        ({"flow_shift": True}, "extra_args.flow_shift", "must be a number, got True"),
        ({"flow_shift": "5"}, "extra_args.flow_shift", "must be a number, got '5'"),
        ({"flow_shift": 0}, "extra_args.flow_shift", "above 0 and at most 1000, got 0"),
        ({"flow_shift": float("nan")}, "extra_args.flow_shift", "got nan"),
        ({"flow_shift": float("inf")}, "extra_args.flow_shift", "got inf"),
        ({"flow_shift": 10**400}, "extra_args.flow_shift", "more than 20 digits"),
    ],
)
def test_extra_args_that_are_refused(extra_args, field, match):
    refused(match, field, extra_args=extra_args)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("num_inference_steps", 5, "must be 4, got 5"),
        ("num_inference_steps", True, "must be an integer, got True"),
        ("num_inference_steps", "4", "must be an integer, got '4'"),
        ("max_sequence_length", 226, "must be 512, got 226"),
        ("num_outputs_per_prompt", 2, "must be 1, got 2"),
        ("num_outputs_per_prompt", 0, "must be 1, got 0"),
        ("latents", np.zeros(3), "noise is drawn from seed"),
        ("generator", [object()], "give seed"),
        ("seed", 1.5, "must be an integer, got 1.5"),
        ("seed", [1, 2], r"must be an integer, got \[1, 2\]"),
        ("seed", True, "must be an integer, got True"),
        ("seed", 2**63, "must fit into 64 bits, got 9223372036854775808"),
        ("fps", 0, "above 0 and at most 1000, got 0"),
        ("fps", -1.0, "got -1.0"),
        ("fps", 1001, "got 1001"),
        ("fps", True, "must be a number, got True"),
        ("fps", "16", "must be a number, got '16'"),
        ("output_type", "mp4", '"np", "pil" or "latent", got .mp4'),
        ("output_type", ["np"], r"got \['np'\]"),
        ("generator_device", "tpu", '"cpu", "cuda" or "npu", got .tpu'),
        ("generator_device", "cuda:x", "got 'cuda:x'"),
        ("generator_device", 0, "got 0"),
    ],
)
def test_parameters_that_are_refused(name, value, match):
    refused(match, name, **{name: value})


def test_long_prompts_pass_here():
    """Truncation at 512 tokens belongs to the tokenizer."""
    words = "word " * 5000
    assert parse(prompt=PROMPT | {"prompt": words}).prompt == words.strip()


def test_cheap_checks_come_before_the_picture_and_the_path(tmp_path):
    missing = with_image(str(tmp_path / "missing.png"))
    refused("got 10", "num_frames", prompt=missing, num_frames=10)
    refused("got 0", "fps", prompt=missing, fps=0, extra_args={"action_path": "nowhere"},
            policy=RequestPolicy(action_root=str(tmp_path)))  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_validation_loads_no_torch():
    code = (
        "import sys\n"
        "from PIL import Image\n"
        "from vllm_omni.diffusion.models.lingbot_world import request\n"
        "from vllm_omni.inputs.data import OmniDiffusionSamplingParams as P\n"
        "prompt = {'prompt': 'a', 'multi_modal_data': {'image': Image.new('RGB', (64, 64))}}\n"
        "request.parse_request(prompt, P(num_frames=9), request.RequestPolicy())\n"
        "import vllm_omni.engine.camera_pose, vllm_omni.outputs, vllm_omni.model_extras\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
