"""Train the toy world from nothing: ``python -m vllm_omni.tools.toy_world.train --out DIR``.

Each stage goes on from what DIR holds, at any moment: the VAE, the latents of the walks, the world,
and the export to DIR/checkpoint.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from vllm_omni.tools.toy_world.export import draw_curve, read_part, recipe, write_checkpoint
from vllm_omni.tools.toy_world.prompts import write_text_parts
from vllm_omni.tools.toy_world.stage import Stage, averaged, curve_of
from vllm_omni.tools.toy_world.train_vae import SHARD, statistics, train_vae, write_shards
from vllm_omni.tools.toy_world.train_world import train_world
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin
from vllm_omni.tools.toy_world.world_twin import WorldShape, WorldTwin

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
