"""Rollouts of scripts by the product beside the renderer's truth, and how far they are from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from vllm_omni import Omni
from vllm_omni.diffusion.geometry import (
    CHUNK_PIXEL_FRAMES,
    FIRST_CHUNK_PIXEL_FRAMES,
    LATENT_FRAMES_PER_CHUNK,
    pixel_frames_of,
)
from vllm_omni.diffusion.utils.island import LIGHTS
from vllm_omni.diffusion.utils.scenes import scene_of
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.tools.toy_world.prompts import NEUTRAL, WORDS
from vllm_omni.tools.toy_world.walks import (
    Walker,
    chunk_lights,
    film,
    key_presses,
    script,
    script_motions,
)

Frames = UInt8[np.ndarray, "_pixel_frames _height _width 3"]
HELD_OUT = 20_000_000
"""Seeds from here on are never trained on."""
KEYS = ("w", "s", "a", "d", "j", "l")
"""Keys that recognition tells apart."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A script, the prompt it is played with, and what the renderer makes of it."""

    keys: list[frozenset[str]]
    prompt: str
    truth: list[Frames]
    """Pixel frames of each chunk; the first of all is the given picture."""


def _by_chunk(frames: Frames) -> list[Frames]:
    return np.split(frames, range(FIRST_CHUNK_PIXEL_FRAMES, len(frames), CHUNK_PIXEL_FRAMES))


def _prompt(light: int) -> str:
    return f"The island at {WORDS[light][0]}."


def _trial(walker: Walker, keys: list[frozenset[str]], light: int, prompt: str) -> Trial:
    lights = chunk_lights([light] * (len(keys) // LATENT_FRAMES_PER_CHUNK), light)
    frames, _ = film(walker, script_motions(keys), lights)
    return Trial(keys, prompt, _by_chunk(frames))


def scene_trial(name: str) -> Trial:
    """The walk that shows a scene of the package."""
    scene = scene_of(name)
    walker = Walker(scene.view.x, scene.view.z, scene.view.heading)
    return _trial(walker, script(scene.keys), LIGHTS.index(name), scene.prompt)


def held_out_trial(index: int, *, chunks: int) -> Trial:
    """A walk by keys from a start that no training walk has, in one of the lights by turns."""
    rng = np.random.default_rng(HELD_OUT + index)
    walker = Walker.anywhere(rng)
    scout = walker.scout()
    press, keys = key_presses(rng), []
    for frame in range(LATENT_FRAMES_PER_CHUNK * chunks):
        keys.append(press(scout))
        if frame:
            scout.step(script_motions([keys[-1]])[0])
    light = index % len(LIGHTS)
    prompt = NEUTRAL[0] if rng.random() < 0.3 else _prompt(light)
    return _trial(walker, keys, light, prompt)


def key_trials(index: int, *, chunks: int) -> list[Trial]:
    """From one start, each key of :data:`KEYS` held; from starts where none is stopped."""
    rng = np.random.default_rng(HELD_OUT + 1_000_000 + index)
    scripts = [[frozenset(key)] * (LATENT_FRAMES_PER_CHUNK * chunks) for key in KEYS]
    walker = _free_walker(rng, scripts)
    light = index % len(LIGHTS)
    return [_trial(walker.scout(), keys, light, _prompt(light)) for keys in scripts]


def _free_walker(rng: np.random.Generator, scripts: Sequence[list[frozenset[str]]]) -> Walker:
    """A walker whom nothing solid stops in any of the scripts."""
    while True:
        walker = Walker.anywhere(rng)
        if not any(_stopped(walker, keys) for keys in scripts):
            return walker


def _stopped(walker: Walker, keys: list[frozenset[str]]) -> bool:
    scout, hits = walker.scout(), 0
    for motion in script_motions(keys):
        scout.step(motion)
        hits += scout.hit
    return hits > 0


def back_trial(index: int) -> Trial:
    """Five steps ahead, or a turn, and the same way back, four chunks in all."""
    rng = np.random.default_rng(HELD_OUT + 2_000_000 + index)
    keys = script(("-1 w5 s5 -1", "-1 l5 j5 -1", "-1 s5 w5 -1", "-1 j5 l5 -1")[index % 4])
    walker = _free_walker(rng, [keys])
    light = index % len(LIGHTS)
    return _trial(walker, keys, light, _prompt(light))


def prompt_trial(index: int, *, chunks: int) -> Trial:
    """A walker who stands still in one light, with a prompt that names another."""
    rng = np.random.default_rng(HELD_OUT + 3_000_000 + index)
    walker = Walker.anywhere(rng)
    first = index % len(LIGHTS)
    light = (first + 1 + index // len(LIGHTS) % 2) % len(LIGHTS)
    keys = script(f"-{LATENT_FRAMES_PER_CHUNK * chunks}")
    frames, _ = film(walker, script_motions(keys), chunk_lights([light] * chunks, first))
    return Trial(keys, _prompt(light), _by_chunk(frames))


def load(model: Path, options: Mapping[str, Any] | None = None) -> Omni:
    """The product on this checkpoint, on a CPU and in float32 unless ``options`` say otherwise."""
    settings: dict[str, Any] = {"streaming_output": True, "device": "cpu", "dtype": "float32"}
    return Omni(str(model), **settings | dict(options or {}))


def play(
    omni: Omni,
    picture: UInt8[np.ndarray, "height width 3"],
    keys: Sequence[frozenset[str]],
    prompt: str,
    *,
    seed: int = 1,
    output_type: str | None = None,
) -> list[np.ndarray]:
    """Roll out one script; returns :data:`Frames` of each chunk, or its latents.

    Args:
        omni: from :func:`load`.
        picture: the first picture.
        keys: held keys of each latent frame, a multiple of three.
        prompt: for the whole rollout.
        seed: of the noise.
        output_type: ``"latent"`` for latents.
    """
    chunks = [
        [sorted(held) for held in keys[i : i + LATENT_FRAMES_PER_CHUNK]]
        for i in range(0, len(keys), LATENT_FRAMES_PER_CHUNK)
    ]
    params = OmniDiffusionSamplingParams(
        height=picture.shape[0],
        width=picture.shape[1],
        num_frames=pixel_frames_of(len(chunks)),
        seed=seed,
        output_type=output_type,
        extra_args={"camera_action_script": chunks},
    )
    request = {"prompt": prompt, "multi_modal_data": {"image": Image.fromarray(picture)}}
    outputs = omni.generate(request, params, py_generator=True, use_tqdm=False)
    return [np.asarray(output.images[0]) for output in outputs]


def roll(omni: Omni, trial: Trial, *, seed: int = 1) -> list[Frames]:
    """What the model makes of a trial, by chunk."""
    return play(omni, trial.truth[0][0], trial.keys, trial.prompt, seed=seed)


def psnr(made: UInt8[np.ndarray, "n h w 3"], truth: UInt8[np.ndarray, "n h w 3"]) -> float:
    """Peak signal-to-noise ratio of the whole clip, dB."""
    error = np.square(made.astype(np.float64) - truth).mean()
    return 10 * math.log10(255**2 / max(float(error), 1e-9))


def ssim(made: UInt8[np.ndarray, "n h w 3"], truth: UInt8[np.ndarray, "n h w 3"]) -> float:
    """Mean structural similarity of grey pictures (Wang et al. 2004) over windows of 7x7."""

    def windows(frames: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n rows columns 7 7"]:
        grey = frames.astype(np.float64).mean(-1)
        return sliding_window_view(grey, (7, 7), axis=(1, 2))[:, ::2, ::2]

    a, b = windows(made), windows(truth)
    mean_a, mean_b = a.mean((3, 4)), b.mean((3, 4))
    var_a, var_b = a.var((3, 4)), b.var((3, 4))
    both = (a * b).mean((3, 4)) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    likeness = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    return float((likeness / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def chunk_scores(made: Sequence[Frames], truth: Sequence[Frames]) -> dict[str, list[float]]:
    """PSNR, SSIM, PSNR of the first picture standing still, drift, detail and contrast by chunk.

    The given picture itself does not count. The drift is the distance of the mean colours, in
    levels of 255; detail (the mean step between neighbouring pixels) and contrast (the spread of
    the colours) are shares of the truth's, which a picture that fades or blurs loses.
    """
    picture = truth[0][:1]
    names = ("psnr", "ssim", "frozen", "drift", "detail", "contrast")
    rows: dict[str, list[float]] = {name: [] for name in names}
    for index, (a, b) in enumerate(zip(made, truth, strict=True)):
        if index == 0:
            a, b = a[1:], b[1:]
        rows["psnr"].append(psnr(a, b))
        rows["ssim"].append(ssim(a, b))
        rows["frozen"].append(psnr(np.broadcast_to(picture, b.shape), b))
        drift = a.mean((0, 1, 2)) - b.mean((0, 1, 2))
        rows["drift"].append(float(np.sqrt(np.square(drift).mean())))
        rows["detail"].append(_detail(a) / _detail(b))
        rows["contrast"].append(float(a.std() / b.std()))
    return rows


def _detail(frames: Frames) -> float:
    levels = frames.astype(np.float64)
    return float(sum(np.abs(np.diff(levels, axis=axis)).mean() for axis in (1, 2)))


def recognised(made: Sequence[Frames], trials: Sequence[Trial], index: int) -> list[bool]:
    """For each chunk, whether of all keys' truths the held key's is the closest."""
    return [
        int(np.argmax([psnr(chunk, trial.truth[place]) for trial in trials])) == index
        for place, chunk in enumerate(made)
    ]


def sheet(
    made: Sequence[Frames], truth: Sequence[Frames], every: int = 12
) -> UInt8[np.ndarray, "h w 3"]:
    """Two rows of frames: the model's above the truth."""
    rows = [np.concatenate(chunks)[::every] for chunks in (made, truth)]
    return np.concatenate([np.concatenate(list(row), 1) for row in rows], 0)
