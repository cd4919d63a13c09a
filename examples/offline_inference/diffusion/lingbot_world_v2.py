"""Make a video from a picture, a prompt and a recorded camera path.

The camera path is a folder with ``poses.npy`` [F, 4, 4] (camera to world) and
``intrinsics.npy`` [F, 4] (fx, fy, cx, cy at 832x480). The MP4 is written while chunks arrive.

    python examples/offline_inference/diffusion/lingbot_world_v2.py \\
        --model CHECKPOINT --image first.png --prompt "A quiet harbour." --action-dir path/
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vllm_omni import Omni
from vllm_omni.diffusion.utils.video_writer import VideoWriter
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput

DEFAULT_MODEL = "robbyant/lingbot-world-v2-14b-causal-fast-diffusers"
FIRST_CHUNK_FRAMES = 9
CHUNK_FRAMES = 12
PIXELS_PER_TOKEN = 16
VIDEO_AXES = 4


@dataclass(frozen=True)
class LingBotPaths:
    """Files of one run.

    Attributes:
        action_root: folder that the engine may read camera paths from.
        action_relative: the camera path inside it.
        camera_frames: poses in the path.
    """

    image: Path
    action_dir: Path
    action_root: Path
    action_relative: str
    camera_frames: int
    output: Path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="checkpoint directory or hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--image", required=True, help="the first picture of the world")
    parser.add_argument("--action-dir", required=True, help="folder of poses and intrinsics")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-frames", type=int, default=9, help="9 + 12k pixel frames")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--ulysses-degree", type=int, default=1)
    parser.add_argument("--flow-shift", type=float, default=5.0)
    parser.add_argument("--fps", type=int, default=16)
    parser.add_argument("--output", default="lingbot_world_v2.mp4")
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation")
    return parser.parse_args(argv)


def resolve_cli_paths(args: argparse.Namespace) -> LingBotPaths:
    """Check files and sizes before the engine starts.

    Raises:
        ConfigError: naming what is wrong and what is needed.
    """
    image = Path(args.image).expanduser()
    action_dir = Path(args.action_dir).expanduser().resolve()
    if not image.is_file():
        raise ConfigError(f"--image {args.image!r} is not a file")
    if not action_dir.is_dir():
        raise ConfigError(f"--action-dir {args.action_dir!r} is not a folder")
    _check_geometry(args)
    camera_frames = _camera_frames(action_dir)
    if camera_frames < args.num_frames:
        raise ConfigError(
            f"--num-frames {args.num_frames} needs as many poses, {action_dir.name} has "
            f"{camera_frames}"
        )
    return LingBotPaths(
        image=image.resolve(),
        action_dir=action_dir,
        action_root=action_dir.parent,
        action_relative=action_dir.name,
        camera_frames=camera_frames,
        output=Path(args.output).expanduser(),
    )


def build_omni_kwargs(args: argparse.Namespace, paths: LingBotPaths) -> dict[str, object]:
    """Keyword arguments of the engine."""
    return {
        "model": args.model,
        "flow_shift": args.flow_shift,
        "tensor_parallel_size": args.tensor_parallel_size,
        "ulysses_degree": args.ulysses_degree,
        "enforce_eager": args.enforce_eager,
        "model_config": {"lingbot_action_root": str(paths.action_root)},
    }


def build_request(
    args: argparse.Namespace, paths: LingBotPaths
) -> tuple[dict[str, object], OmniDiffusionSamplingParams]:
    """Prompt and sampling parameters."""
    prompt = {"prompt": args.prompt, "multi_modal_data": {"image": str(paths.image)}}
    params = OmniDiffusionSamplingParams(
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        num_inference_steps=4,
        max_sequence_length=512,
        seed=args.seed,
        fps=args.fps,
        extra_args={"action_path": paths.action_relative, "flow_shift": args.flow_shift},
    )
    return prompt, params


def extract_video_array(output: OmniRequestOutput) -> np.ndarray:
    """Frames [F, H, W, 3] of an output; a leading batch axis of one is dropped."""
    video = np.asarray(output.images[0])
    if video.ndim == VIDEO_AXES + 1 and len(video) == 1:
        video = video[0]
    if video.ndim != VIDEO_AXES:
        raise ValueError(f"expected frames [F, H, W, 3], got shape {video.shape}")
    return video


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    args = parse_args(argv)
    paths = resolve_cli_paths(args)
    prompt, params = build_request(args, paths)
    num_chunks = 1 + (args.num_frames - FIRST_CHUNK_FRAMES) // CHUNK_FRAMES
    with (
        Omni(**build_omni_kwargs(args, paths), streaming_output=True) as omni,
        VideoWriter(paths.output, fps=args.fps, width=args.width, height=args.height) as video,
        tqdm(total=num_chunks, unit="chunk") as bar,
    ):
        started = time.perf_counter()
        for output in omni.generate(prompt, params, py_generator=True):
            frames = extract_video_array(output)
            seconds = time.perf_counter() - started
            video.write(frames)
            bar.set_postfix_str(f"{seconds * 1000:.0f} ms/chunk, {len(frames) / seconds:.1f} fps")
            bar.update()
            started = time.perf_counter()
    print(f"Saved {video.pixel_frames} frames to {paths.output}")


def _check_geometry(args: argparse.Namespace) -> None:
    for name, side in (("--height", args.height), ("--width", args.width)):
        if side < PIXELS_PER_TOKEN or side % PIXELS_PER_TOKEN:
            raise ConfigError(f"{name} must be a positive multiple of 16, got {side}")
    extra = args.num_frames - FIRST_CHUNK_FRAMES
    if extra < 0 or extra % CHUNK_FRAMES:
        raise ConfigError(
            f"--num-frames must be 9 + 12k (three latent frames per chunk), got {args.num_frames}"
        )
    for name, degree in (
        ("--tensor-parallel-size", args.tensor_parallel_size),
        ("--ulysses-degree", args.ulysses_degree),
    ):
        if degree < 1:
            raise ConfigError(f"{name} must be at least 1, got {degree}")


def _camera_frames(action_dir: Path) -> int:
    shapes = {}
    for name, tail in (("poses", (4, 4)), ("intrinsics", (4,))):
        file = action_dir / f"{name}.npy"
        if not file.is_file():
            raise ConfigError(f"{action_dir.name} has no {file.name}")
        shape = np.load(file, mmap_mode="r", allow_pickle=False).shape
        if shape[1:] != tail or not shape[0]:
            raise ConfigError(f"{file.name} must have shape [F, {', '.join(map(str, tail))}], got "
                             f"{list(shape)}")  # fmt: skip
        shapes[name] = shape[0]
    if shapes["poses"] != shapes["intrinsics"]:
        raise ConfigError(
            f"poses.npy has {shapes['poses']} rows, intrinsics.npy {shapes['intrinsics']}"
        )
    return shapes["poses"]


if __name__ == "__main__":
    try:
        main()
    except OmniError as error:
        sys.exit(f"error: {error}")
