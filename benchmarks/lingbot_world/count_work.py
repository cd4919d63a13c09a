"""Count what a steady chunk launches, moves and computes at the real model's shapes.

    python -m benchmarks.lingbot_world.count_work
    python -m benchmarks.lingbot_world.count_work --ranks 1 --json work.json

The product's own modules run on the ``meta`` device, so that no accelerator and no checkpoint is
needed: eagerly, and with blocks compiled as on CUDA, by the plans of torch's compiler for an H200.
Everything is counted, nothing is measured; ``chunk_times.py`` says how counts become times.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from benchmarks.lingbot_world.bench_real import World, scale_of
from benchmarks.lingbot_world.chunk_times import ChunkTimes, chunk_times
from benchmarks.lingbot_world.fused_kernels import (
    PlannedAttention,
    inductor_plans,
    planned_norm_silu,
)
from benchmarks.lingbot_world.kernel_counter import (
    Kernel,
    KernelCounter,
    Kind,
    launched,
    note,
    totals,
)
from benchmarks.lingbot_world.roofline import TRIMMED, table, vae_counts
from benchmarks.lingbot_world.roofline_counts import (
    TEXT_TOKENS,
    Model,
    chunk_exchange,
    chunk_flops,
    chunk_traffic,
)
from benchmarks.lingbot_world.roofline_devices import TERA
from benchmarks.lingbot_world.roofline_vae import Vae, fused_bytes
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.distributed.comm import Message, UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup, TrafficKind
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.layers.linear import GeluLinearMethod, PlainLinearMethod
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.camera import MOVE_STEP, RayView
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_uint8
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.columns import WHOLE_FRAME, ColumnShard
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

GIGA = 1e9
META = torch.device("meta")
RANKS = (1, 4)
PIXEL_FRAMES = 12
TRANSFORMER_PARTS = ("camera", "probes", "commit")

PartKernels = dict[str, list[Kernel]]
"""The kernels of each part of a chunk, by the name of the part."""


@dataclass(frozen=True, slots=True)
class SilentGroup(RankGroup):
    """A place among ranks that are not there: nothing is sent, what arrives has no values."""

    @override
    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """Leave ``received`` as it is; on ``meta`` it has no values."""
        note(
            Kernel("gather", Kind.MESSAGE, mine.nbytes * (self.size - 1)),
            Kernel("gather", Kind.WAIT, 0),
        )


@dataclass(frozen=True, slots=True)
class SilentMessage(Message):
    """A message that nobody gets."""

    name: str

    @override
    def wait(self) -> None:
        note(Kernel(self.name, Kind.WAIT, 0))


class SilentExchange(UlyssesExchange):
    """Packs, counts and unpacks as the product does, and sends nothing."""

    @override
    def _all_to_all(self, received: Tensor, send: Tensor, kind: TrafficKind) -> Message:
        name = f"all to all of {tuple(send.shape)}"
        sent_bytes = send.nbytes - send.nbytes // self.group.size
        with kind.counted(sent_bytes):
            note(Kernel(name, Kind.MESSAGE, sent_bytes))
        return SilentMessage(Work(), send, kind, name)


@dataclass(frozen=True, slots=True)
class SilentShard(ColumnShard):
    """A rank with a neighbour at each side."""

    @override
    def swap(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return borders of the right shape."""
        return torch.empty_like(left), torch.empty_like(right)

    @override
    def gather_slabs(self, slab: Tensor) -> Tensor:
        """Return slabs of the right shape."""
        return slab.new_empty(self.group.size, *slab.shape)


def count_kernels(work: Callable[[], object]) -> list[Kernel]:
    """Run ``work`` once and return what it would launch."""
    with KernelCounter() as counter:
        work()
    return counter.kernels


@torch.inference_mode()
def count_transformer(
    ranks: int, layers: int | None = None, *, compiled: bool = False
) -> tuple[PartKernels, TrafficKind]:
    """Count camera, probes and commit of a chunk on the second rank of its group.

    Args:
        layers: ``None`` for all of the model's.
        compiled: whether to count blocks as a GPU compiles them, within :func:`inductor_plans`.

    Returns:
        The kernels of each part, and what the rank exchanges in all of them.
    """
    scale = scale_of("full")
    config, geometry = scale.transformer, scale.geometry
    if layers is not None:
        config = replace(config, num_layers=layers)
    group = SINGLE if ranks == 1 else SilentGroup(1, ranks, None)
    exchange = SilentExchange(group)
    parts = LayerParts(
        config=config, dtype=torch.bfloat16, linear=PlainLinearMethod(),
        product_with_gelu=GeluLinearMethod() if compiled else None,
        backend=PlannedAttention() if compiled else create_attention_backend("sdpa"),
        tensor_parallel=SINGLE, exchange=exchange,
    ).around_the_compiler()  # fmt: skip
    with META:
        model = CausalLingBotWorldTransformer3DModel(parts)
    if compiled:
        model.compile_blocks(model.chunk_tokens(geometry))
    world = World(model, geometry, META)
    text = model.embed_text(_empty(TEXT_TOKENS, config.text_dim))
    condition = _empty(config.in_channels - config.out_channels, *world.size)
    rays = RayView(geometry, torch.bfloat16, META)
    with KernelCounter() as camera:
        folded = rays.fold_after_anchor(np.eye(4), np.stack([np.eye(4)] * 3), MOVE_STEP)
        context = world.context(folded, text, config.window.window_frames)
    with KernelCounter() as probes:
        clean = world.denoise(condition, context, torch.Generator())
    with KernelCounter() as last:
        world.commit(clean, condition, context)
    counted = (camera.kernels, probes.kernels, last.kernels)
    return dict(zip(TRANSFORMER_PARTS, counted, strict=True)), exchange.traffic.total


@torch.inference_mode()
def count_vae(ranks: int, *, fused: bool = False) -> PartKernels:
    """Count decode, conversion to bytes and encode of a later chunk.

    A rank encodes, decodes and converts its own columns.

    Args:
        fused: whether norm and SiLU are one kernel, as they are where blocks are compiled.
    """
    scale = scale_of("full")
    geometry = scale.geometry
    with META:
        vae = WanVAE(scale.vae).to(torch.bfloat16)
        vae.prepare()
    vae.fuse_norms(planned_norm_silu if fused else None)
    sides = geometry.latent_height, geometry.latent_width
    shard = SilentShard(SilentGroup(1, ranks, None), geometry.latent_width)
    columns = WHOLE_FRAME if ranks == 1 else shard
    latents = torch.empty(scale.vae.z_dim, LATENT_FRAMES_PER_CHUNK, *sides, device=META)
    _, decoder = vae.decode(latents, DecoderState(), columns)
    video, _ = vae.decode(latents, decoder, columns)
    pixels = _empty(3, PIXEL_FRAMES, geometry.height, geometry.width)
    _, encoder = vae.encode(pixels[:, : PIXEL_FRAMES - 3], EncoderState(), columns)
    return {
        "decode": count_kernels(lambda: vae.decode(latents, decoder, columns)),
        "uint8": count_kernels(lambda: to_uint8(video, piece_elements=video.numel())),
        "encode": count_kernels(lambda: vae.encode(pixels, encoder, columns)),
    }


@dataclass(frozen=True, slots=True)
class PartBound:
    """The least that a part needs on one rank, with its elementwise work fused."""

    flops: float
    elementwise_bytes: float


def bounds(ranks: int) -> dict[str, PartBound]:
    """Return the counted bounds of ``roofline.py`` for the transformer, decode and encode."""
    model = Model()
    vae = vae_counts(model, Vae())
    fused = {name: fused_bytes(count, model.element_bytes) for name, count in vae.items()}
    return {
        "transformer": PartBound(
            chunk_flops(model, TRIMMED).total / ranks,
            chunk_traffic(model, TRIMMED.forwards).elementwise_fused_bytes / ranks,
        ),
        "decode": PartBound(vae["decode"].flops / ranks, fused["decode"] / ranks),
        "encode": PartBound(vae["encode"].flops / ranks, fused["encode"] / ranks),
    }


@dataclass(frozen=True, slots=True)
class RankWork:
    """Everything that one rank of a group does in a steady chunk.

    Attributes:
        compiled: the parts that are other kernels where blocks are compiled.
    """

    ranks: int
    parts: PartKernels
    exchanged: TrafficKind
    compiled: PartKernels

    @property
    def uploads(self) -> int:
        """Copies from the host while the chunk is made."""
        made = [kernel for kernels in self.parts.values() for kernel in kernels]
        return totals(made, Kind.UPLOAD).kernels

    @property
    def times(self) -> ChunkTimes:
        """What the compiled parts take on an H200."""
        return chunk_times(self.compiled, self.ranks)

    def rows(self) -> Iterator[tuple[str, list[Kernel]]]:
        """Yield the eager parts, the three of the transformer together before their parts."""
        yield "transformer", _together(self.parts)
        yield from self.parts.items()

    def fused(self) -> PartKernels:
        """Return the compiled parts, the three of the transformer together before their parts."""
        return {"transformer": _together(self.compiled), **self.compiled}

    def as_json(self) -> dict[str, object]:
        """Return counts beside bounds, and the bytes of each elementwise operator."""
        return {
            "parts": {name: _sums(kernels) for name, kernels in self.rows()},
            "compiled": {name: _sums(kernels) for name, kernels in self.fused().items()},
            "bounds": {name: asdict(bound) for name, bound in bounds(self.ranks).items()},
            "operators": {name: dict(by_operator(kernels)) for name, kernels in self.rows()},
            "milliseconds": self.times.rows(),
            "uploads": self.uploads,
            "exchanges": self.exchanged.calls,
            "exchanged_bytes": self.exchanged.sent_bytes,
            "exchanged_bytes_bound": chunk_exchange(Model(), self.ranks, TRIMMED).total_bytes,
        }


def count_rank(ranks: int) -> RankWork:
    """Count a rank of a group of ``ranks``."""
    transformer, exchanged = count_transformer(ranks)
    with inductor_plans():
        compiled, _ = count_transformer(ranks, compiled=True)
    compiled |= count_vae(ranks, fused=True)
    return RankWork(ranks, transformer | count_vae(ranks), exchanged, compiled)


def by_operator(kernels: list[Kernel]) -> list[tuple[str, tuple[int, int]]]:
    """Return launches and bytes of each elementwise operator, the most bytes first."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind is Kind.ELEMENTWISE:
            found[kernel.operator].append(kernel)
    sums = [(name, (len(made), sum(k.moved_bytes for k in made))) for name, made in found.items()]
    return sorted(sums, key=lambda row: -row[1][1])


def report(work: RankWork) -> str:
    """Lay out the counts of one rank as a table, with the bound in the last two columns."""
    least, compiled = bounds(work.ranks), work.fused()
    rows = []
    for name, kernels in work.rows():
        sums = [totals(kernels, kind) for kind in Kind]
        bound, fused = least.get(name), compiled.get(name)
        rows.append(
            [
                name,
                str(len(launched(kernels))),
                f"{sum(part.flops for part in sums) / TERA:.2f}",
                f"{totals(kernels, Kind.ELEMENTWISE).moved_bytes / GIGA:.1f}",
                str(len(launched(fused))) if fused else "",
                f"{totals(fused, Kind.ELEMENTWISE).moved_bytes / GIGA:.1f}" if fused else "",
                f"{bound.flops / TERA:.2f}" if bound else "",
                f"{bound.elementwise_bytes / GIGA:.1f}" if bound else "",
            ]
        )
    text = table(
        f"One rank of {work.ranks}, one steady chunk, eager and compiled",
        [
            "part",
            "kernels",
            "TFLOP",
            "elementwise GB",
            "kernels, compiled",
            "GB, compiled",
            "TFLOP bound",
            "GB bound",
        ],
        rows,
    )
    times = [[name, f"{ms:.1f}"] for name, ms in work.times.rows().items()]
    return (
        f"{text}\n  {work.uploads} uploads, no read-back; {work.exchanged.calls} exchanges of "
        f"{work.exchanged.sent_bytes / GIGA:.2f} GB in the transformer\n\n"
        f"{table('Milliseconds on an H200 at assumed rates, compiled', ['part', 'ms'], times)}"
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=(1, 2, 4, 8),
                        help="sizes of the worker group (default: 1 4)")  # fmt: skip
    parser.add_argument("--top", type=int, default=0, metavar="N",
                        help="also print the N elementwise operators that move most")  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print one table for each size of group."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    counted = [count_rank(ranks) for ranks in options.ranks]
    for work in counted:
        print(f"\n{report(work)}")
        for name, kernels in work.rows() if options.top else ():
            rows = by_operator(kernels)[: options.top]
            cells = [[op, str(calls), f"{moved / GIGA:.1f}"] for op, (calls, moved) in rows]
            print(f"\n{table(f'{name}, elementwise', ['operator', 'kernels', 'GB'], cells)}")
    if options.json:
        written = {str(work.ranks): work.as_json() for work in counted}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def _together(parts: PartKernels) -> list[Kernel]:
    return [kernel for name in TRANSFORMER_PARTS for kernel in parts[name]]


def _sums(kernels: list[Kernel]) -> dict[str, object]:
    return {kind.value: asdict(totals(kernels, kind)) for kind in Kind}


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


if __name__ == "__main__":
    main()
