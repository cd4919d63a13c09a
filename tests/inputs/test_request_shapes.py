"""The request validator: lengths, sizes and cameras, with the numbers that its errors hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.requests import IDLE_CHUNK, parse, policy, refused, with_image
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import LiveCamera, RecordedCamera
from vllm_omni.inputs.checking import MAX_CHUNKS

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


# --- length ---------------------------------------------------------------------------------------


@given(st.integers(0, MAX_CHUNKS - 1))
def test_nine_and_twelve_more_per_chunk(extra_chunks):
    assert parse(num_frames=9 + 12 * extra_chunks).num_chunks == 1 + extra_chunks


@given(st.integers(1, 10**7).filter(lambda n: n < 9 or (n - 9) % 12))
def test_other_counts_are_refused_with_the_rule(num_frames):
    got = "1 counts as none" if num_frames == 1 else f"got {num_frames}; nearest"
    refused(f"9 \\+ 12k pixel frames .9, 21, 33, 45, ....*{got}", "num_frames",
            num_frames=num_frames)  # fmt: skip


@pytest.mark.parametrize(
    ("num_frames", "near"),
    [
        (2, "9"), (8, "9"), (10, "9 and 21"), (20, "9 and 21"), (22, "21 and 33"),
        (80, "69 and 81"), (11_999_996, "11999985 and 11999997"),
    ],
)  # fmt: skip
def test_counts_near_a_legal_one_are_refused_with_what_is_legal(num_frames, near):
    refused(f"got {num_frames}; nearest: {near}$", "num_frames", num_frames=num_frames)


@pytest.mark.parametrize("num_frames", [None, 1])
def test_a_missing_length_is_asked_for_with_what_else_there_is(num_frames):
    words = "is required: .* 9 \\+ 12k .*none was given, and 1 counts as none"
    refused(f"{words}$", "num_frames", num_frames=num_frames, unbounded=None)
    refused(f"{words}; or give unbounded: true for an endless world$", "num_frames",
            num_frames=num_frames, unbounded=False)  # fmt: skip


@pytest.mark.parametrize("num_frames", [9, 21, 81])
def test_legal_counts(num_frames):
    assert parse(num_frames=num_frames).num_chunks == (num_frames - 9) // 12 + 1


@pytest.mark.parametrize(
    ("num_frames", "match"),
    [
        ("21", 'must be an integer, got "21"'),
        (0, "must be at least 1, got 0"),
        (-3, "must be at least 1, got -3"),
        (21.0, "must be an integer, got 21.0"),
        (1e9, "must be an integer, got 1000000000.0"),
        (True, "must be an integer, got true"),
        (10**9, "at most 11999997, got 1000000000"),
        (9 + 12 * MAX_CHUNKS, "at most 11999997, got 12000009"),
        pytest.param(10**5000, "at most 11999997, got a value of type int", id="5000_digits"),
    ],
)
def test_counts_of_another_kind_or_too_large_are_refused(num_frames, match):
    refused(match, "num_frames", num_frames=num_frames)


def test_a_script_for_a_huge_clip_allocates_nothing():
    refused("needs 1000000 chunks for num_frames 11999997, got 1",
            "extra_args.camera_action_script", num_frames=9 + 12 * (MAX_CHUNKS - 1),
            extra_args={"camera_action_script": [IDLE_CHUNK]})  # fmt: skip


def test_unbounded_sessions():
    for num_frames in (None, 1):
        assert parse(unbounded=True, num_frames=num_frames).num_chunks is None
    refused("unbounded session, got 21", "num_frames", unbounded=True, num_frames=21)
    for name, value in (("action_path", "walk"), ("camera_action_script", [IDLE_CHUNK])):
        refused("fixed length", f"extra_args.{name}", unbounded=True, num_frames=None,
                extra_args={name: value})  # fmt: skip


# --- size -----------------------------------------------------------------------------------------


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
    told = policy(geometry=VideoGeometry(96, 160))
    request = parse(policy=told, height=None, width=None)
    assert (request.height, request.width) == (96, 160)
    request = parse(policy=told, height=480, width=832)
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
        (0, 96, "height", "must be at least 1, got 0"),
        (64, -16, "width", "got -16"),
        ("64", 96, "height", 'must be an integer, got "64"'),
        (64, 96.0, "width", "must be an integer, got 96.0"),
        (True, 96, "height", "must be an integer, got true"),
        (4112, 96, "height", "at most 4096, got 4112"),
        (64, 10**40, "width", "at most 4096, got 1000000"),
    ],
)
def test_sizes_that_are_refused(height, width, field, match):
    refused(match, field, height=height, width=width)


def test_numpy_integers_are_integers():
    assert parse(height=np.int64(64), num_frames=np.int32(21)).num_chunks == 2


def test_sizes_that_the_ranks_cannot_share_are_refused_with_both_numbers():
    told = policy(parallel=DiffusionParallelConfig(ulysses_degree=2))
    assert parse(policy=told, height=64, width=96).height == 64
    refused("240x240 has 225 tokens .*ulysses_degree 2", "height", policy=told, height=240,
            width=240)  # fmt: skip
    refused("has 225 tokens", "height", policy=policy(
        parallel=DiffusionParallelConfig(ulysses_degree=4)), height=240, width=240)  # fmt: skip


# --- camera ---------------------------------------------------------------------------------------


def recorded(root, frames=21):
    (root / "walk").mkdir()
    np.save(root / "walk" / "poses.npy", np.tile(np.eye(4), (frames, 1, 1)))
    np.save(root / "walk" / "intrinsics.npy", np.full((frames, 4), 300.0))
    return policy(action_root=str(root), allow_live_camera=False)


def test_a_recorded_path_has_a_pose_for_each_pixel_frame(tmp_path):
    told = recorded(tmp_path)
    camera = parse(policy=told, num_frames=21, extra_args={"action_path": "walk"}).camera
    assert isinstance(camera, RecordedCamera)
    assert camera.poses.shape == (21, 4, 4)
    refused("has 21 frames, num_frames 33", "extra_args.action_path", policy=told,
            num_frames=33, extra_args={"action_path": "walk"})  # fmt: skip
    refused("leaves the trusted root", "extra_args.action_path", policy=told,
            extra_args={"action_path": "../walk"})  # fmt: skip


@pytest.mark.parametrize(
    ("extra_args", "field", "match"),
    [
        ({"action_path": "walk"}, "extra_args.action_path", "lingbot_action_root"),
        ({"action_path": 7}, "extra_args.action_path", "must be a string, got 7"),
        (
            {"action_path": "a", "camera_action_script": [IDLE_CHUNK]},
            "extra_args.camera_action_script",
            "excludes action_path",
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
            'chunk 0 needs lists of keys, got "w"',
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
            policy=policy(allow_live_camera=False))  # fmt: skip


def test_absent_values_are_absent():
    extra_args = {"action_path": None, "camera_action_script": None, "flow_shift": None}
    assert isinstance(parse(extra_args=extra_args).camera, LiveCamera)
    assert isinstance(parse(extra_args=None).camera, LiveCamera)
