"""Make a short video on any CPU from a drawn picture, a prompt and a recorded camera path.

The model is a tiny one that has learnt one small island by heart, run by the real program.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vllm_omni.diffusion.geometry import VideoGeometry, chunk_play_ms, chunks_of
from vllm_omni.entrypoints.command_parser import integer

if TYPE_CHECKING:
    from vllm_omni import Omni

_FPS = 16.0
_CAMERA = "glide"
_SHEET_EVERY = 4
"""Every fourth pixel frame goes onto the contact sheet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-omni demo`` to its parser."""
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of results")
    parser.add_argument("--num-frames", type=integer, default=45, help="9 + 12k pixel frames")
    parser.add_argument("--height", type=integer, default=64, help="multiple of 16")
    parser.add_argument("--width", type=integer, default=96, help="multiple of 16")
    parser.add_argument("--scene", default="day", help="day, dusk or night")
    parser.add_argument("--seed", type=integer, default=42)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, the picture, the camera path, the video and the contact sheet."""
    from vllm_omni.diffusion.utils.video_writer import VideoWriter, contact_sheet

    num_chunks = chunks_of(args.num_frames)
    geometry = VideoGeometry(args.height, args.width)
    picture = _prepare(args.out, args.scene, geometry, args.num_frames)
    picked, pixel_frames, chunk_ms = [], 0, []
    video, sheet = args.out / "video.mp4", args.out / "contact_sheet.png"
    with (
        closing(_load_model(args.out)) as omni,
        VideoWriter(video, fps=_FPS, width=geometry.width, height=geometry.height) as writer,
    ):
        started = time.perf_counter()
        for frames in _rollout(omni, args, picture):
            chunk_ms.append(1000 * (time.perf_counter() - started))
            picked.extend(frames[-pixel_frames % _SHEET_EVERY :: _SHEET_EVERY])
            pixel_frames += len(frames)
            writer.write(frames)
            print(
                f"chunk {len(chunk_ms)}/{num_chunks}: {len(frames):2d} pixel frames in "
                f"{chunk_ms[-1]:.0f} ms",
                flush=True,
            )
            started = time.perf_counter()
    captions = [f"{index * _SHEET_EVERY / _FPS:.2f} s" for index in range(len(picked))]
    contact_sheet(picked, captions=captions).save(sheet)
    print(f"wrote {video} ({pixel_frames} pixel frames at {_FPS:g} fps) and {sheet}")
    _summarise(chunk_ms)
    return 0


def _prepare(out: Path, scene: str, geometry: VideoGeometry, pixel_frames: int) -> Image.Image:
    """Write the inputs of the rollout; returns the first frame."""
    from vllm_omni.diffusion.utils.scenes import (
        first_picture,
        gliding_path,
        write_camera_path,
        write_model,
    )

    picture = first_picture(scene, height=geometry.height, width=geometry.width)
    write_model(out / "model")
    write_camera_path(out / "camera" / _CAMERA, gliding_path(pixel_frames))
    picture.save(out / "first_frame.png")
    print(
        f"wrote {out}/model (a small trained world), first_frame.png ({scene}, {geometry}), camera/"
    )
    return picture


def _load_model(out: Path) -> "Omni":
    from vllm_omni import Omni  # loads torch

    started = time.perf_counter()
    omni = Omni(
        model=str(out / "model"),
        streaming_output=True,
        device="cpu",  # on a machine with a GPU, too, whichever build of torch it has
        model_config={"lingbot_action_root": str(out / "camera")},
    )
    print(f"loaded the model in {time.perf_counter() - started:.1f} s")
    return omni


def _rollout(
    omni: "Omni", args: argparse.Namespace, picture: Image.Image
) -> Iterator[UInt8[np.ndarray, "frames height width 3"]]:
    """The pixel frames of each chunk, through the public Python interface."""
    from vllm_omni.diffusion.utils.scenes import scene_of
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    prompt = {"prompt": scene_of(args.scene).prompt, "multi_modal_data": {"image": picture}}
    params = OmniDiffusionSamplingParams(
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        seed=args.seed,
        fps=_FPS,
        extra_args={"action_path": _CAMERA},
    )
    for output in omni.generate(prompt, params, py_generator=True, use_tqdm=False):
        yield cast(np.ndarray, output.images[0])  # one chunk, uint8, when streaming


def _summarise(chunk_ms: list[float]) -> None:
    print(f"time to first chunk: {chunk_ms[0]:.0f} ms")
    later = chunk_ms[1:]
    if later:
        mean_ms = sum(later) / len(later)
        play_ms = chunk_play_ms(_FPS)
        print(
            f"each further chunk: {mean_ms:.0f} ms; it plays {play_ms:.0f} ms at {_FPS:g} fps "
            f"({play_ms / mean_ms:.1f} x real time)"
        )
    print("The model knows one small island, blurred; a real checkpoint makes pictures of its own.")
