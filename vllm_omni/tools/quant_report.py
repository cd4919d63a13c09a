"""Measures what 8-bit feed-forward linears lose on a checkpoint.

``python -m vllm_omni.tools.quant_report CHECKPOINT`` prints, for one scene of the toy world:

- the relative error of each quantised linear on the activations of the first chunk;
- the cosine of latent frame 0, made with and without quantisation;
- for every chunk, the error of its latents when both begin from the same history (the one made
  without quantisation), and the worst chunk. Such errors do not add up over the rollout.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.linear import ShardedLinear
from vllm_omni.diffusion.layers.quant_w8a8 import (
    ComparedLinearMethod,
    ComparedMode,
    Int8LinearMethod,
)
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    OutputKind,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
)
from vllm_omni.diffusion.models.lingbot_world.load import load_pipeline
from vllm_omni.diffusion.models.lingbot_world.pipeline import LingBotWorldCausalDMDPipeline
from vllm_omni.diffusion.models.lingbot_world.session import LingBotSession
from vllm_omni.diffusion.models.lingbot_world.tokenizer import load_tokenizer
from vllm_omni.diffusion.utils.scenes import SCENES, first_picture
from vllm_omni.diffusion.worker.worker import plan_kv_pool
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool
from vllm_omni.platforms import create_platform

_KEYS = ("w", "wl", "w", "wj", "d", "a")
_PROMPT = "A quiet place in the light of early evening. The camera glides slowly forward."
_SESSION = "report"


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative error of one linear's output over all its calls in the first chunk."""

    name: str
    relative: float


@dataclass(frozen=True, slots=True)
class ChunkError:
    """Latents of one chunk with and without quantisation, from the same history."""

    index: int
    cosine: float
    relative: float


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What 8 bits lose and save.

    Attributes:
        latent_0_cosine: of the first latent frame of the rollout.
        plain_bytes: of the weights that are quantised.
        int8_bytes: of the same weights in bytes, scales included.
    """

    layers: tuple[LayerError, ...]
    latent_0_cosine: float
    chunks: tuple[ChunkError, ...]
    plain_bytes: int
    int8_bytes: int

    @property
    def worst_chunk(self) -> ChunkError:
        """The chunk with the largest error."""
        return max(self.chunks, key=lambda chunk: chunk.relative)

    def lines(self) -> Iterator[str]:
        """Return the report as lines of text."""
        for layer in self.layers:
            yield f"{layer.name:<24} relative error {layer.relative:.5f}"
        for chunk in self.chunks:
            yield f"chunk {chunk.index}: cosine {chunk.cosine:.6f}, relative {chunk.relative:.5f}"
        worst = self.worst_chunk
        yield f"worst chunk {worst.index}: cosine {worst.cosine:.6f}, relative {worst.relative:.5f}"
        yield f"latent frame 0: cosine {self.latent_0_cosine:.6f}"
        yield f"quantised weights: {self.plain_bytes} bytes before, {self.int8_bytes} after"


def make_report(
    config: OmniDiffusionConfig, *, num_chunks: int, scene: str = "day", seed: int = 42
) -> QuantReport:
    """Load the model once, in both forms, and compare them over a rollout."""
    platform = create_platform(config.device)
    device = platform.device(0)
    fractal = config.npu_quant_weight_format == "nz"
    method = ComparedLinearMethod(Int8LinearMethod(platform.int8_ops(), fractal=fractal))
    pipeline = load_pipeline(
        config, platform=platform, device=device, parallel=ParallelState(), feed_forward=method
    )
    budget = plan_kv_pool(config, pipeline, platform, platform.free_bytes(device))
    spec = pipeline.kv_cache_spec()
    pipeline.bind_pool(KVPool(spec, budget.num_pages, dtype=pipeline.dtype, device=device))
    session = pipeline.open_session(_SESSION, _request(config, num_chunks, scene, seed))
    pairs = [_chunk(pipeline, session, method, index) for index in range(num_chunks)]
    session.close()
    quantised = list(_quantised(pipeline.model.transformer, method))
    return QuantReport(
        layers=tuple(LayerError(n, method.errors[id(layer)].relative) for n, layer in quantised),
        latent_0_cosine=_cosine(*(latents[:, :, 0] for latents in pairs[0])),
        chunks=tuple(
            ChunkError(index, _cosine(exact, int8), _relative(exact, int8))
            for index, (exact, int8) in enumerate(pairs)
        ),
        plain_bytes=sum(layer.get_parameter("weight").nbytes for _, layer in quantised),
        int8_bytes=sum(
            layer.get_buffer("weight_int8").nbytes + layer.get_buffer("weight_scale").nbytes
            for _, layer in quantised
        ),
    )


def _chunk(
    pipeline: LingBotWorldCausalDMDPipeline,
    session: LingBotSession,
    method: ComparedLinearMethod,
    index: int,
) -> tuple[Float32[Tensor, "..."], Float32[Tensor, "..."]]:
    """The chunk without and with quantisation, from one history and one noise.

    What a probe writes into the window is overwritten, so the history stays the plain one.
    """
    generator, plan = session.setup.generator, ChunkPlan(_SESSION, index)
    noise = generator.get_state()
    method.mode = ComparedMode.INT8
    int8, _ = pipeline.denoise_chunk(session, plan)
    generator.set_state(noise)
    method.mode = ComparedMode.BOTH if index == 0 else ComparedMode.PLAIN
    exact, _ = pipeline.denoise_chunk(session, plan)
    method.mode = ComparedMode.PLAIN
    pipeline.commit_chunk(session)
    assert exact is not None, "a single rank hands out its latents"
    assert int8 is not None, "a single rank hands out its latents"
    return exact.cpu(), int8.cpu()


def _request(config: OmniDiffusionConfig, num_chunks: int, scene: str, seed: int) -> SessionRequest:
    size = config.prepared_geometry
    picture = first_picture(scene, height=size.height, width=size.width)
    keys = (frozenset(_KEYS[chunk % len(_KEYS)]) for chunk in range(num_chunks))
    return SessionRequest(
        prompt=load_tokenizer(Path(config.model))(_PROMPT),
        image=SourceImage(rgb=np.asarray(picture)),
        height=size.height,
        width=size.width,
        num_chunks=num_chunks,
        seed=seed,
        camera=ScriptedKeys(tuple((held, held, held) for held in keys)),
        output=OutputKind.LATENT,
    )


def _quantised(
    module: nn.Module, method: ComparedLinearMethod
) -> Iterator[tuple[str, ShardedLinear]]:
    for name, layer in module.named_modules():
        if isinstance(layer, ShardedLinear) and layer.method is method:
            yield name, layer


def _cosine(a: Float32[Tensor, "..."], b: Float32[Tensor, "..."]) -> float:
    wide = [x.double().flatten() for x in (a, b)]
    return float(torch.nn.functional.cosine_similarity(*wide, dim=0))


def _relative(exact: Float32[Tensor, "..."], other: Float32[Tensor, "..."]) -> float:
    return float((other.double() - exact.double()).norm() / exact.double().norm())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quant_report", description="What 8 bits lose on a checkpoint."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or npu")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--chunks", type=int, default=7, help=f"{LATENT_FRAMES_PER_CHUNK} latents")
    parser.add_argument("--weight-format", default="nz", help="nz or nd")
    parser.add_argument("--scene", default="day", choices=sorted(SCENES))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one checkpoint and print the report."""
    args = _arguments(argv)
    config = OmniDiffusionConfig(
        model=str(args.checkpoint),
        device=args.device,
        dtype=args.dtype,
        geometry=VideoGeometry(args.height, args.width),
        npu_quant_weight_format=args.weight_format,
    )
    report = make_report(config, num_chunks=args.chunks, scene=args.scene, seed=args.seed)
    for line in report.lines():
        print(line)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
