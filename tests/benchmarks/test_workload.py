"""Lengths, camera scripts and workload files of the live benchmark."""

import json

import pytest

from vllm_omni.benchmarks import workload
from vllm_omni.benchmarks.workload import (
    PromptUpdate,
    Workload,
    WorkloadError,
    build_camera_script,
    chunks_for_frames,
    frames_for_chunks,
    load_workload,
    session_start,
)
from vllm_omni.diffusion.geometry import chunk_pixel_frames

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def rollout(num_chunks: int, **fields: object) -> Workload:
    """A small workload with a picture that needs no drawing."""
    return load_workload(None, {"num_chunks": num_chunks, "image": "https://host/a.png", **fields})


@pytest.mark.parametrize("chunks", range(1, 33))
def test_frames_and_chunks_are_inverse(chunks):
    frames = frames_for_chunks(chunks)
    assert chunks_for_frames(frames) == chunks
    assert frames == sum(chunk_pixel_frames(index) for index in range(chunks))


def test_known_counts():
    assert (chunks_for_frames(33), chunks_for_frames(81)) == (3, 7)
    assert [chunk_pixel_frames(index) for index in range(3)] == [9, 12, 12]


@pytest.mark.parametrize("frames", [8, 10, 20, 22, 80, 0, -3])
def test_other_frame_counts_are_refused(frames):
    with pytest.raises(WorkloadError, match="9 \\+ 12k"):
        chunks_for_frames(frames)


def test_script_of_each_pattern():
    assert build_camera_script("forward", 2) == ((("w",),) * 3,) * 2
    assert build_camera_script("hold", 1) == (((), (), ()),)
    keys = [chunk[0][0] for chunk in build_camera_script("orbit", 6)]
    assert keys == ["w", "a", "s", "d", "w", "a"]
    with pytest.raises(WorkloadError, match=r"must be one of .*'spin'"):
        build_camera_script("spin", 1)


def test_defaults():
    plain = load_workload(None, {})
    assert (plain.num_chunks, plain.num_frames) == (16, 189)
    assert (plain.width, plain.height, plain.fps, plain.seed) == (832, 480, 16, 42)
    assert plain.flow_shift == 5.0


def test_start_message():
    message = session_start(rollout(2, negative_prompt="fog"), model="world")
    assert message == {
        "type": "session.start", "format": "m4s", "prompt": workload.DEFAULT_PROMPT,
        "image_reference": {"image_url": "https://host/a.png"},
        "width": 832, "height": 480, "num_frames": 21, "fps": 16, "seed": 42,
        "extra_params": {
            "flow_shift": 5.0, "camera_action_script": ((("w",),) * 3,) * 2,
        },
        "model": "world", "negative_prompt": "fog",
    }  # fmt: skip
    assert "model" not in session_start(rollout(2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"camera_action_script": [[["w"], ["w"]]]}, "has 2 latent frames, needs 3"),
        ({"camera_action_script": [[["x"], [], []]]}, "unknown keys \\['x'\\]"),
        ({"camera_action_script": []}, "is empty"),
        ({"camera_action_script": [[[], [], []]], "num_chunks": 2}, "fixes the length to 1"),
        ({"num_chunks": 2, "width": 830}, "width must be a multiple of 16, got 830"),
        ({"num_chunks": 2, "height": 0}, "height must be a multiple of 16"),
        ({"num_chunks": 0}, "num_chunks: must be at least 1, got 0"),
        ({"num_chunks": True}, "num_chunks: must be an integer, got true"),
        ({"prompt": "no length"}, "has no length"),
        ({"num_chunks": 2, "speed": 1}, "unknown keys \\['speed'\\]"),
        ({"num_chunks": 3, "prompt_updates": [{"after_chunk": 2, "prompt": "x"}]},
         "after chunk 2 changes nothing"),
        ({"num_chunks": 3, "prompt_updates": [{"prompt": "x"}]}, "needs after_chunk"),
        ({"num_chunks": 3, "prompt_updates": {}}, "must be a list"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path, values, words):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(values))
    with pytest.raises(WorkloadError, match=words):
        load_workload(path, {})


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(
        json.dumps({
            "prompt": "file", "num_chunks": 4, "seed": 1, "fps": 12, "image": "a.png",
            "prompt_updates": [{"after_chunk": 1, "prompt": "rain"}],
            "extra_params": {"key": 1},
        })
    )  # fmt: skip
    got = load_workload(path, {"seed": 2, "prompt": None, "num_chunks": 5})
    assert (got.prompt, got.seed, got.num_chunks, got.fps) == ("file", 2, 5, 12)
    assert got.prompt_updates == (PromptUpdate(1, "rain", 3),)
    assert got.image == str(tmp_path / "a.png")
    assert session_start(
        load_workload(path, {"image": "https://h/x.png"})
    )["extra_params"]["key"] == 1  # fmt: skip


def test_a_script_fixes_the_length(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"camera_action_script": [[["W"], ["l"], []]] * 3}))
    got = load_workload(path, {})
    assert got.num_chunks == 3
    assert got.camera_action_script[0] == (("w",), ("l",), ())


def test_pictures(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    url = workload.image_url(str(picture), width=64, height=48)
    assert url == "data:image/png;base64,iVBORw=="
    assert workload.image_url("https://h/a", width=64, height=48) == "https://h/a"
    drawn = workload.image_url(None, width=64, height=48)
    assert drawn.startswith("data:image/png;base64,iVBORw0KGgo")
    with pytest.raises(FileNotFoundError, match="image not found"):
        workload.image_url(str(tmp_path / "none.png"), width=64, height=48)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(WorkloadError, match="not a picture"):
        workload.image_url(str(tmp_path / "a.txt"), width=64, height=48)


def test_the_modules_of_the_checkout_are_those_of_the_package():
    from benchmarks.lingbot_world import benchmark_lingbot_world_realtime as program
    from benchmarks.lingbot_world import workload as by_path
    from vllm_omni.benchmarks import realtime, session

    names = [name for name in by_path.__all__ if vars(by_path)[name] is vars(workload)[name]]
    assert names == by_path.__all__
    assert (program.main, program.parse_args) == (realtime.main, realtime.parse_args)
    assert (program.run_session, program.endpoint_url) == (
        session.run_session,
        session.endpoint_url,
    )
