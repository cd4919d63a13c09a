"""Train the toy world from nothing: ``python -m vllm_omni.tools.toy_world.train --out DIR``.

Each stage goes on from what DIR holds, at any moment: the VAE, the latents of the walks, the world,
and the export to DIR/checkpoint: weights in the product's layout, the recipe and the curves.
"""

import argparse
import json
import math
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR, write_weights
from vllm_omni.tools.toy_world.prompts import write_text_parts
from vllm_omni.tools.toy_world.stage import Stage, averaged, curve_of
from vllm_omni.tools.toy_world.train_vae import SHARD, statistics, train_vae, write_shards
from vllm_omni.tools.toy_world.train_world import train_world
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin
from vllm_omni.tools.toy_world.world_twin import WorldShape, WorldTwin

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_CURVES = "training.json"
Curve = list[dict[str, float]]
"""Points of a stage: step, CPU minutes, and figures by name."""
_WIDTH, _HEIGHT, _EDGE = 640, 360, 48
_INKS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_STAGES = ("vae", "latents", "world", "export")
_SMOKE = {
    "walks": SHARD,
    "chunks": 6,
    "vae_steps": 100,
    "pictures": 0.95,
    "world_steps": 100,
    "batch": 1,
}
_WORLD_FIGURES = ("start_first", "start_last", "later_first", "later_last")


def main(argv: list[str] | None = None) -> int:
    """Run the stages that are asked for, in order; 1 if a smoke run lowers no loss."""
    args = _parse(argv)
    vae, world = args.out / "vae.pt", args.out / "world.pt"
    latents, text = args.out / "latents", args.out / "text"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start is not None:
        _adopt(args.start, vae, VaeTwin(VaeShape()), "vae")
        _adopt(args.start, world, WorldTwin(WorldShape()), "transformer")
    if "vae" in args.stages:
        train_vae(vae, steps=args.vae_steps, pictures=args.pictures)
        draw_curve(args.out / "vae.png", curve_of(vae), ["psnr"], title="VAE: PSNR, dB")
    if "latents" in args.stages:
        write_shards(latents, vae, walks=args.walks, chunks=args.chunks)
    if "world" in args.stages:
        write_text_parts(text)
        train_world(world, latents, text, steps=args.world_steps, batch=args.batch, peak=args.peak)
    if "export" in args.stages:
        _export(args.out)
    return int(args.smoke and not _lowered(args.out))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of everything")
    parser.add_argument("--stages", nargs="+", choices=_STAGES, default=_STAGES)
    parser.add_argument("--walks", type=int, default=1500, help=f"multiple of {SHARD}")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of a walk")
    parser.add_argument("--vae-steps", type=int, default=1750)
    parser.add_argument("--pictures", type=float, default=0.4, help="share of single pictures")
    parser.add_argument("--world-steps", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step of the world")
    parser.add_argument("--peak", type=float, default=5e-3, help="learning rate of the world")
    parser.add_argument("--start", type=Path, help="an exported checkpoint to go on from")
    parser.add_argument(
        "--smoke", action="store_true", help="90 CPU seconds, then judge the losses"
    )
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**_SMOKE)
    return parser.parse_args(argv)


def _adopt(start: Path, path: Path, model: nn.Module, part: str) -> None:
    if not path.exists():
        Stage(path, model, steps=1, peak=0.0).adopt(*read_part(start, part))


def _export(out: Path) -> None:
    vae, world, target = out / "vae.pt", out / "world.pt", out / "checkpoint"
    numbers = statistics(out / "latents")
    curves = {"vae": curve_of(vae), "transformer": curve_of(world)}
    size = write_checkpoint(
        target, vae=averaged(vae), world=averaged(world), statistics=numbers, curves=curves
    )
    shards = sorted((out / "latents").glob("*.pt"))
    chunks = torch.load(shards[0])["prompts"].shape[1]
    text = recipe(
        curve_of(vae), curve_of(world), walks=SHARD * len(shards), chunks=chunks, size=size
    )
    (target / "README.md").write_text(text)
    draw_curve(out / "world.png", curve_of(world), _WORLD_FIGURES, title="world: share of variance")
    print(f"wrote {target}: {size / 1e6:.2f} MB")


def _lowered(out: Path) -> bool:
    vae, world = curve_of(out / "vae.pt"), curve_of(out / "world.pt")
    better_vae = vae[-1]["psnr"] > vae[0]["psnr"] + 1
    better_world = world[-1]["later_last"] < 0.8 * world[0]["later_last"]
    print(f"losses fell: VAE {better_vae}, world {better_world}")
    return better_vae and better_world


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
