"""The offline example: arguments, checks before the engine starts, and a run on the tiny model."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pytest
from PIL import Image

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.utils.scenes import gliding_path, write_camera_path
from vllm_omni.outputs import OmniRequestOutput

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

_FILE = (
    Path(__file__).resolve().parents[3] / "examples/offline_inference/diffusion/lingbot_world_v2.py"
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lingbot_world_v2_example", _FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> Path:
    Image.new("RGB", (96, 64), (10, 80, 160)).save(tmp_path / "first.png")
    write_camera_path(tmp_path / "camera" / "glide", gliding_path(33))
    return tmp_path


def arguments(files: Path, *more: str) -> list[str]:
    return [
        *("--image", str(files / "first.png"), "--prompt", "A quiet road."),
        *("--action-dir", str(files / "camera" / "glide"), "--height", "64", "--width", "96"),
        *more,
    ]


def test_engine_arguments_are_exactly_these(example: ModuleType, files: Path):
    args = example.parse_args(arguments(files, "--ulysses-degree", "2", "--enforce-eager"))
    paths = example.resolve_cli_paths(args)
    assert example.build_omni_kwargs(args, paths) == {
        "model": "robbyant/lingbot-world-v2-14b-causal-fast-diffusers",
        "flow_shift": 5.0,
        "tensor_parallel_size": 1,
        "ulysses_degree": 2,
        "enforce_eager": True,
        "model_config": {"lingbot_action_root": str(files / "camera")},
    }
    assert (paths.action_relative, paths.camera_frames) == ("glide", 33)


def test_the_request_names_the_recorded_path(example: ModuleType, files: Path):
    args = example.parse_args(arguments(files, "--num-frames", "21", "--seed", "7"))
    prompt, params = example.build_request(args, example.resolve_cli_paths(args))
    assert prompt["multi_modal_data"] == {"image": str(files / "first.png")}
    assert (params.num_frames, params.seed, params.num_inference_steps) == (21, 7, 4)
    assert params.max_sequence_length == 512
    assert params.extra_args == {"action_path": "glide", "flow_shift": 5.0}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--num-frames", "10"), "9 \\+ 12k"),
        (("--num-frames", "45"), "45 needs as many poses, glide has 33"),
        (("--height", "60"), "multiple of 16, got 60"),
        (("--ulysses-degree", "0"), "--ulysses-degree must be at least 1"),
        (("--image", "nowhere.png"), "'nowhere.png' is not a file"),
        (("--action-dir", "nowhere"), "'nowhere' is not a folder"),
    ],
)
def test_bad_arguments_are_refused_before_the_engine(
    example: ModuleType, files: Path, more: tuple[str, ...], text: str
):
    with pytest.raises(ValueError, match=text):
        example.resolve_cli_paths(example.parse_args(arguments(files, *more)))


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("poses", np.zeros((33, 3, 4)), r"poses.npy must have shape \[F, 4, 4\], got \[33, 3, 4\]"),
        ("intrinsics", np.zeros((32, 4)), "33 rows, intrinsics.npy 32"),
    ],
)
def test_bad_camera_files_are_refused(
    example: ModuleType, files: Path, name: str, array: np.ndarray, text: str
):
    np.save(files / "camera" / "glide" / f"{name}.npy", array)
    with pytest.raises(ValueError, match=text):
        example.resolve_cli_paths(example.parse_args(arguments(files)))


def test_missing_camera_files_are_refused(example: ModuleType, files: Path):
    (files / "camera" / "glide" / "poses.npy").unlink()
    with pytest.raises(ValueError, match=r"has no poses\.npy"):
        example.resolve_cli_paths(example.parse_args(arguments(files)))


def test_video_arrays_are_unwrapped(example: ModuleType):
    frames = np.zeros((9, 4, 6, 3), np.uint8)
    for wrapped in (frames, frames[None]):
        output = OmniRequestOutput("r", images=[wrapped])
        assert example.extract_video_array(output).shape == frames.shape
    with pytest.raises(ValueError, match="got shape"):
        example.extract_video_array(OmniRequestOutput("r", images=[frames[0]]))


def test_a_run_writes_every_frame(
    example: ModuleType, files: Path, capsys: pytest.CaptureFixture[str]
):
    out = files / "out.mp4"
    more = ("--model", str(tiny_checkpoint_dir()), "--num-frames", "21", "--output", str(out))
    example.main(arguments(files, *more))
    assert f"Saved 21 frames to {out}" in capsys.readouterr().out
    with av.open(str(out)) as video:
        assert sum(1 for _ in video.decode(video=0)) == 21
        assert video.streams.video[0].average_rate == 16


def test_two_ranks_write_the_bytes_of_one(example: ModuleType, files: Path):
    # Bitwise: Ulysses ranks reorder no sum.
    videos = []
    for degree in ("1", "2"):
        out = files / f"{degree}.mp4"
        more = ("--model", str(tiny_checkpoint_dir()), "--ulysses-degree", degree)
        example.main(arguments(files, *more, "--num-frames", "21", "--output", str(out)))
        videos.append(out.read_bytes())
    assert videos[0] == videos[1]


def test_a_failed_run_leaves_no_file(example: ModuleType, files: Path):
    out = files / "out.mp4"
    with pytest.raises(ValueError, match="model_index"):
        example.main(arguments(files, "--model", str(files), "--output", str(out)))
    assert not list(files.glob("*out*"))
