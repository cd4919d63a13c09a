"""The twins as a checkpoint in the product's layout, which the product's loader reads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR, write_weights
from vllm_omni.tools.toy_world.prompts import write_text_parts
from vllm_omni.tools.toy_world.vae_twin import VaeShape
from vllm_omni.tools.toy_world.world_twin import WorldShape

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_CURVES = "training.json"
Curves = dict[str, list[dict[str, float]]]
"""Points of the curve of each part of a checkpoint, ``vae`` and ``transformer``."""


def write_checkpoint(
    directory: Path,
    *,
    vae: Mapping[str, Tensor],
    world: Mapping[str, Tensor],
    statistics: tuple[Float[Tensor, "16"], Float[Tensor, "16"]],
    curves: Curves | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write every file of the checkpoint and return their size in bytes.

    Args:
        directory: made if need be; files of these names are replaced.
        vae: weights of the VAE twin.
        world: weights of the transformer's twin.
        statistics: mean and spread of each latent channel.
        curves: of the training, with which :func:`read_part` lets it go on.
        dtype: of the stored weights.
    """
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TEMPLATE_DIR / name, directory / name)
    write_text_parts(directory)
    mean, spread = (part.tolist() for part in statistics)
    latents: dict[str, object] = {"latents_mean": mean, "latents_std": spread}
    _write_part(directory, "vae", VaeShape().fields() | latents, vae, dtype)
    _write_part(directory, "transformer", WorldShape().fields(), world, dtype)
    if curves is not None:
        (directory / _CURVES).write_text(json.dumps(curves, indent=0) + "\n")
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def read_part(directory: Path, part: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights and curve of ``vae`` or ``transformer`` of a checkpoint written with curves."""
    return load_file(directory / part / _WEIGHTS), json.loads((directory / _CURVES).read_text())[
        part
    ]


def _write_part(
    directory: Path,
    part: str,
    fields: Mapping[str, object],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    (directory / part).mkdir(exist_ok=True)
    config = json.loads((TEMPLATE_DIR / part / "config.json").read_text()) | fields
    (directory / part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {name: weight.detach().to(dtype).contiguous() for name, weight in weights.items()}
    write_weights(directory / part / _WEIGHTS, stored)
