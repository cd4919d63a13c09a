"""Rollouts of a checkpoint through the product's own interface."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vllm_omni import Omni
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, pixel_frames_of
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

Frames = UInt8[np.ndarray, "_pixel_frames _height _width 3"]


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
