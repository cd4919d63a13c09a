"""The pictures of the documentation: the scenes' walks as the model and the renderer show them.

``python -m vllm_omni.tools.toy_world.showcase --out DIR`` writes ``toy_world.webp``, an animation,
and ``toy_world.png``, a contact sheet. Each scene is a column or a pair of rows, the model above,
the renderer below.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from vllm_omni.diffusion.utils.scenes import MODEL, SCENES
from vllm_omni.tools.toy_world.score import Frames, load, roll, scene_trial, sheet

_FPS = 16
_ZOOM = 2


def main(argv: list[str] | None = None) -> int:
    """Roll out the walk of every scene and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint of the toy world")
    parser.add_argument("--out", type=Path, required=True, help="folder of the two files")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    pairs, sheets = [], []
    with load(args.model) as omni:
        for name in SCENES:
            trial = scene_trial(name)
            made = roll(omni, trial)
            pairs.append(np.concatenate([np.concatenate(made), np.concatenate(trial.truth)], 1))
            sheets.append(sheet(made, trial.truth))
    _write_animation(args.out / "toy_world.webp", np.concatenate(pairs, 2))
    Image.fromarray(np.concatenate(sheets)).save(args.out / "toy_world.png", optimize=True)
    return 0


def _write_animation(path: Path, frames: Frames) -> None:
    pictures = [Image.fromarray(frame) for frame in frames]
    size = (pictures[0].width * _ZOOM, pictures[0].height * _ZOOM)
    first, *rest = [picture.resize(size, Image.Resampling.BICUBIC) for picture in pictures]
    every_ms = round(1000 / _FPS)
    first.save(
        path, save_all=True, append_images=rest, duration=every_ms, loop=0, quality=40, method=6
    )


if __name__ == "__main__":
    main()
