"""The tiny checkpoint on this machine: chunk time by part, attention, decode paths, pixels."""

import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.lingbot_world.bench_timing import Clock, peak_bytes
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.data import KVCacheConfig, OmniDiffusionConfig
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkTimings,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
)
from vllm_omni.diffusion.models.lingbot_world.load import read_checkpoint
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_uint8
from vllm_omni.diffusion.models.lingbot_world.tokenizer import load_tokenizer
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.diffusion.models.loader import load_weights
from vllm_omni.diffusion.worker.worker import Worker

DECODE_GOAL = 0.3
PARTS = ("condition_ms", "camera_ms", "probes_ms", "decode_ms", "commit_ms")
_FORWARDS = 5


def small_run(model: Path, geometry: VideoGeometry, device: str, chunks: int) -> dict[str, object]:
    """Everything that is measured on a small model.

    Args:
        chunks: chunks of the rollout; those after the window is full count for the medians.
    """
    config = OmniDiffusionConfig(
        model=str(model), device=device, dtype="float32", geometry=geometry, max_num_seqs=1
    )
    worker = Worker(config)
    worker.pipeline.waits_at_laps = True
    clock = Clock(worker.device)
    facts = read_checkpoint(model, KVCacheConfig())
    with torch.inference_mode():
        rollout = _rollout(worker, model, geometry, chunks)
        attention = _attention(worker, geometry, clock)
        decode = _decode(model, facts.vae, geometry, clock)
    full = rollout["window_full_from_chunk"]
    probes_and_commit = rollout["median_ms"]["probes_ms"] + rollout["median_ms"]["commit_ms"]
    share = attention["self_attention_ms_per_chunk"] / probes_and_commit
    return {
        "size": str(geometry),
        "chunks": chunks,
        "included": f"median of chunks {full} to {chunks - 1}; decode and commit inside the sum",
        "chunk": rollout,
        "attention": {**attention, "share_of_probes_and_commit": share},
        "decode": decode,
        "peak_bytes": peak_bytes(worker.device),
    }


def _rollout(
    worker: Worker, model: Path, geometry: VideoGeometry, chunks: int
) -> dict[str, object]:
    worker.open_session("bench", bench_request(model, geometry, chunks))
    timings = [
        worker.run_chunk(ChunkPlan("bench", chunk), lambda _: None) for chunk in range(chunks)
    ]
    worker.close_session("bench")
    window = worker.pipeline.kv_cache_spec().window_frames
    full = min(-(-window // LATENT_FRAMES_PER_CHUNK), chunks - 1)
    medians = {
        part: statistics.median(part_ms(timing, part) for timing in timings[full:])
        for part in PARTS
    }
    return {
        "window_full_from_chunk": full,
        "median_ms": medians,
        "total_ms": sum(medians.values()),
        "each_ms": [part_ms(timing, *PARTS) for timing in timings],
    }


def bench_request(model: Path, geometry: VideoGeometry, chunks: int) -> SessionRequest:
    """A walk forward from a grey picture."""
    return SessionRequest(
        prompt=load_tokenizer(model)("a castle above a jungle"),
        image=SourceImage(rgb=np.full((geometry.height, geometry.width, 3), 128, np.uint8)),
        height=geometry.height,
        width=geometry.width,
        num_chunks=chunks,
        seed=0,
        camera=ScriptedKeys(((frozenset("w"),) * LATENT_FRAMES_PER_CHUNK,) * chunks),
    )


def part_ms(timing: ChunkTimings, *parts: str) -> float:
    """Milliseconds of these parts of a chunk together."""
    return sum(float(getattr(timing, part)) for part in parts)


def _attention(worker: Worker, geometry: VideoGeometry, clock: Clock) -> dict[str, float]:
    """Self-attention over the full window, alone, times its calls in a chunk."""
    spec, config = worker.pipeline.kv_cache_spec(), worker.pipeline.config
    name = config.attention_backend
    backend = create_attention_backend(
        worker.platform.attention_backend if name == "auto" else name
    )
    tokens = geometry.tokens_per_frame
    query, key, value = (
        torch.randn(frames * tokens, spec.num_kv_heads, spec.head_dim, device=worker.device)
        for frames in (LATENT_FRAMES_PER_CHUNK, spec.window_frames, spec.window_frames)
    )
    scale = spec.head_dim**-0.5
    call_ms = clock.median(lambda: backend.attend(query, key, value, scale=scale), 20)
    calls = _FORWARDS * spec.num_layers - 1  # the commit's last layer attends to nothing
    return {
        "self_attention_call_ms": call_ms,
        "self_attention_calls_per_chunk": calls,
        "self_attention_ms_per_chunk": calls * call_ms,
    }


def _decode(
    model: Path, config: VaeConfig, geometry: VideoGeometry, clock: Clock
) -> dict[str, float]:
    """A later chunk's decode by the plain conv3d path and by ours, and its pixels as bytes."""
    latents = torch.randn(
        config.z_dim, LATENT_FRAMES_PER_CHUNK, geometry.latent_height, geometry.latent_width,
        device=clock.device,
    )  # fmt: skip
    measured: dict[str, float] = {}
    for path in ("conv3d", "auto"):
        vae = WanVAE(config, conv_path=path)
        load_weights(model / "vae", weight_targets(vae))
        vae.requires_grad_(requires_grad=False).to(clock.device).prepare()
        _, state = vae.decode(latents, DecoderState())
        video, state = vae.decode(latents, state)
        measured[f"{path}_ms"] = clock.median(lambda: vae.decode(latents, state), 5)  # noqa: B023
    ratio = measured["auto_ms"] / measured["conv3d_ms"]
    uint8_ms = clock.median(lambda: to_uint8(video), 10)
    return {**measured, "ratio": ratio, "ratio_goal": DECODE_GOAL, "uint8_ms": uint8_ms}
