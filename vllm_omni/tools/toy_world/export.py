"""What a training leaves behind: a checkpoint in the product's layout, its recipe, its curves."""

import json
import math
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import Tensor

from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR, write_weights
from vllm_omni.tools.toy_world.prompts import write_text_parts
from vllm_omni.tools.toy_world.vae_twin import VaeShape
from vllm_omni.tools.toy_world.world_twin import WorldShape

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_CURVES = "training.json"
Curve = list[dict[str, float]]
"""Points of a stage: step, CPU minutes, and figures by name."""
_WIDTH, _HEIGHT, _EDGE = 640, 360, 48
_INKS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def write_checkpoint(
    directory: Path,
    *,
    vae: Mapping[str, Tensor],
    world: Mapping[str, Tensor],
    statistics: tuple[Float[Tensor, "16"], Float[Tensor, "16"]],
    curves: Mapping[str, Curve] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write every file of the checkpoint and return their size in bytes.

    Args:
        directory: made if need be; files of these names are replaced.
        vae: weights of the VAE twin.
        world: weights of the transformer's twin.
        statistics: mean and spread of each latent channel.
        curves: of ``vae`` and ``transformer``, with which :func:`read_part` lets training go on.
        dtype: of the stored weights.
    """
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TEMPLATE_DIR / name, directory / name)
    write_text_parts(directory)
    mean, spread = (part.tolist() for part in statistics)
    latents: dict[str, object] = {"latents_mean": mean, "latents_std": spread}
    _write_part(directory, "vae", asdict(VaeShape()) | latents, vae, dtype)
    _write_part(directory, "transformer", asdict(WorldShape()), world, dtype)
    if curves is not None:
        (directory / _CURVES).write_text(json.dumps(curves, indent=0) + "\n")
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def read_part(directory: Path, part: str) -> tuple[dict[str, Tensor], Curve]:
    """Weights and curve of ``vae`` or ``transformer`` of a checkpoint written with curves."""
    curves = json.loads((directory / _CURVES).read_text())
    return load_file(directory / part / _WEIGHTS), curves[part]


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


def draw_curve(path: Path, curve: Curve, names: Sequence[str], *, title: str) -> None:
    """Draw figures against CPU minutes as a PNG; falling ones (losses) on a logarithmic scale."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    minutes = np.array([point["cpu_minutes"] for point in curve])
    lines = {name: np.array([point.get(name, math.nan) for point in curve]) for name in names}
    every = np.concatenate(list(lines.values()))
    low, high = float(np.nanmin(every)), float(np.nanmax(every))
    logarithmic = low > 0 and not title.endswith("dB")

    def place(x: float, y: float) -> tuple[float, float]:
        a, b, c = (math.log(v) if logarithmic else v for v in (low, y, high))
        share = (b - a) / ((c - a) or 1)
        across = _EDGE + (_WIDTH - 2 * _EDGE) * x / (float(minutes[-1]) or 1)
        return across, _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * share

    draw.rectangle((_EDGE, _EDGE, _WIDTH - _EDGE, _HEIGHT - _EDGE), outline="#999999")
    draw.text((_EDGE, 8), title, fill="black")
    for value in (low, high):
        draw.text((4, place(0.0, value)[1] - 6), f"{value:.3g}", fill="black")
    end = f"{minutes[-1]:.1f} CPU minutes, {curve[-1]['step']:.0f} steps"
    draw.text((_WIDTH - _EDGE - 6 * len(end), _HEIGHT - _EDGE + 8), end, fill="black")
    for index, (name, values) in enumerate(lines.items()):
        ink = _INKS[index % len(_INKS)]
        points = [
            place(float(x), float(y))
            for x, y in zip(minutes, values, strict=True)
            if math.isfinite(float(y))
        ]
        draw.line(points, fill=ink, width=2)
        draw.text((_EDGE + 8 + 110 * index, 24), name, fill=ink)
    image.save(path)


def recipe(vae: Curve, world: Curve, *, walks: int, chunks: int, size: int) -> str:
    """The README of a checkpoint: how it came about, in figures."""
    last_vae, last_world = vae[-1], world[-1]
    return f"""# A small trained world

Weights of the toy world in the layout of LingBot-World v2, {size / 1e6:.2f} MB in bfloat16. They
show one fixed procedural island, which they have learnt by heart, at 96x64, and nothing else.

Made by `python -m vllm_omni.tools.toy_world.train` on a CPU, one thread:

| stage | steps | CPU minutes | last figures |
|---|---|---|---|
| VAE | {last_vae["step"]:.0f} | {last_vae["cpu_minutes"]:.1f} | {_figures(last_vae)} |
| world | {last_world["step"]:.0f} | {last_world["cpu_minutes"]:.1f} | {_figures(last_world)} |

{walks} walks of {chunks} chunks (seeds 0 to {walks - 1}); the VAE learns from walks of its own. All
random draws start at seed 0. torch {torch.__version__}, numpy {np.__version__}, Python
{platform.python_version()}. The figures of the world are shares of the latents' variance: what is
wrong with the first and with the last of the four probes, in a session's first four chunks
(`start`) and later.
"""


def _figures(point: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.3g}"
        for name, value in point.items()
        if name not in {"step", "cpu_minutes"}
    )
