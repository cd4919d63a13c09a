"""Replays whole rollouts: a picture, a prompt and a camera become latents and pixels."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.archive import Archive, first_fact
from tests.golden.report import Made, Skipped
from tests.helpers.golden import GoldenSet
from vllm_omni.diffusion.camera_motion import normalise_keys
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import (
    LATENT_FRAMES_PER_CHUNK,
    SPATIAL_FACTOR,
    VideoGeometry,
    pixel_frames_of,
)
from vllm_omni.diffusion.messages import (
    CameraSource,
    ChunkPlan,
    LiveCamera,
    OutputKind,
    RecordedCamera,
    ScriptedKeys,
    SessionRequest,
)
from vllm_omni.diffusion.models.lingbot_world.camera import create_camera_track
from vllm_omni.diffusion.models.lingbot_world.chunk import DMD_LABELS, draw_noise
from vllm_omni.diffusion.models.lingbot_world.pipeline import LingBotWorldCausalDMDPipeline
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.inputs.picture import load_image

_CPU = torch.device("cpu")
_PARTS = ("latents", "condition", "camera", "noise", "video", "uint8")
_DEFAULT_SEED, _DEFAULT_SHIFT = 42, 5.0
_INPUT_FILES = {
    "image": "inputs/image.jpg",
    "prompt": "inputs/prompt.txt",
    "poses": "inputs/poses.npy",
    "intrinsics": "inputs/intrinsics.npy",
}


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of a set: the prefix of its arrays and what it was made from."""

    prefix: str
    request: SessionRequest
    plans: tuple[ChunkPlan, ...]
    dtype: str
    reuse_last_step: bool


def claim(golden: GoldenSet, names: Sequence[str]) -> list[str]:
    """Names of this family: everything below a prefix whose latents are a result."""
    return [name for name in names if _is_tick(name) or _prefix_of(golden, name) is not None]


def replay(golden: GoldenSet, names: Sequence[str], archive: Archive) -> Iterator[tuple[str, Made]]:
    """Make the named arrays; those of the tick mode are skipped."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        if _is_tick(name):
            yield name, Skipped("array of the tick mode, which is out of scope")
        else:
            wanted.setdefault(_prefix_of(golden, name) or "", []).append(name)
    workers: dict[str, Worker] = {}
    for prefix, arrays in wanted.items():
        rollout = _describe(golden, prefix, archive)
        config = OmniDiffusionConfig(
            model=str(archive.checkpoint),
            dtype=rollout.dtype,
            geometry=VideoGeometry(rollout.request.height, rollout.request.width),
            reuse_last_step_kv=rollout.reuse_last_step,
        )
        key = repr(config)
        if key not in workers:
            workers[key] = Worker(config)
        made = _run(workers[key].pipeline, rollout)
        for name in arrays:
            part = name.rpartition(".")[2]
            if part in made:
                yield name, made[part]


def _is_tick(name: str) -> bool:
    return any(part == "tick" or part.startswith("tick_") for part in name.split("."))


def _prefix_of(golden: GoldenSet, name: str) -> str | None:
    prefix, _, part = name.rpartition(".")
    entries = golden.manifest["arrays"]
    entry = entries.get(f"{prefix}.latents") or entries.get(f"{prefix}.uint8", {})
    is_result = part in _PARTS and entry.get("role") == "output"
    return prefix if is_result else None


def _describe(golden: GoldenSet, prefix: str, archive: Archive) -> Rollout:
    entries = golden.manifest["arrays"]
    entry = entries.get(f"{prefix}.latents") or entries[f"{prefix}.uint8"]
    how = _parameters(entry.get("how", ""))
    height, width, chunks = _size(golden, prefix)
    files = {**_INPUT_FILES, **(first_fact(golden.manifest, "inputs") or {})}
    paths = {key: archive.root / file for key, file in files.items()}
    text = f"{prefix} {entry.get('what', '')}"
    extra = how.get("extra_args", {})
    camera, plans = _camera(golden, text, chunks, paths)
    seed = _number("seed", text, _DEFAULT_SEED)
    shift = _number("shift", prefix, _DEFAULT_SHIFT)
    latent_only = f"{prefix}.uint8" not in entries and f"{prefix}.video" not in entries
    request = SessionRequest(
        prompt=" ".join(paths["prompt"].read_text(encoding="utf-8").split()),
        image=load_image(paths["image"]),
        height=height,
        width=width,
        num_chunks=chunks,
        seed=int(how.get("seed", seed)),
        camera=camera,
        output=OutputKind.LATENT if latent_only else OutputKind.UINT8,
        flow_shift=float(extra.get("flow_shift", shift)),
    )
    said = f"{text} {json.dumps(how)}"
    return Rollout(
        prefix,
        request,
        plans,
        dtype="bfloat16" if re.search(r"bf16|bfloat16", text) else "float32",
        reuse_last_step="reuse" in said,
    )


def _parameters(how: str) -> dict[str, Any]:
    return json.loads(how) if how.startswith("{") else {}


def _number(key: str, text: str, default: float) -> float:
    match = re.search(rf"{key}[ =:_]*([\d.]*\d)", text)
    return default if match is None else float(match[1])


def _size(golden: GoldenSet, prefix: str) -> tuple[int, int, int]:
    latents = golden.arrays.get(f"{prefix}.latents")
    if latents is not None:
        frames, rows, columns = latents.shape[-3:]
        return SPATIAL_FACTOR * rows, SPATIAL_FACTOR * columns, frames // LATENT_FRAMES_PER_CHUNK
    frames, height, width, _ = golden.arrays[f"{prefix}.uint8"].shape
    return height, width, next(n for n in range(1, frames) if pixel_frames_of(n) >= frames)


def _camera(
    golden: GoldenSet, text: str, chunks: int, paths: dict[str, Path]
) -> tuple[CameraSource, tuple[ChunkPlan, ...]]:
    """The camera that a rollout's name or description speaks of; a recorded path otherwise."""
    plans = tuple(ChunkPlan("golden", chunk) for chunk in range(chunks))
    if "script" in text:
        script = first_fact(golden.manifest, "script")
        return ScriptedKeys(
            tuple(tuple(normalise_keys(keys) for keys in frames) for frames in script)
        ), plans
    if "interact" in text:
        # Poses noted after chunk c are those of chunk c + 1; the first chunk stands still.
        noted = first_fact(golden.manifest, "interact.poses")
        poses = [np.tile(np.eye(4), (LATENT_FRAMES_PER_CHUNK, 1, 1)), *map(np.array, noted)]
        return LiveCamera(), tuple(
            ChunkPlan("golden", chunk, poses=poses[chunk]) for chunk in range(chunks)
        )
    poses, intrinsics = (
        np.load(paths[name])[: pixel_frames_of(chunks)].astype(np.float32)
        for name in ("poses", "intrinsics")
    )
    return RecordedCamera(poses, intrinsics), plans


def _run(pipeline: LingBotWorldCausalDMDPipeline, rollout: Rollout) -> dict[str, torch.Tensor]:
    """All parts of one rollout."""
    request = rollout.request
    session = pipeline.open_session("golden", request)
    latents, conditions, pixels = [], [], []
    try:
        for plan in rollout.plans:
            output, _ = pipeline.denoise_chunk(session, plan)
            latents.append(session.pending.clean)
            conditions.append(session.pending.condition)
            pixels.append(output)
            pipeline.commit_chunk(session)
    finally:
        session.close()
    made = {
        "latents": torch.cat(latents, dim=1),
        "condition": torch.cat(conditions, dim=1),
        "camera": _camera_tensors(rollout, pipeline),
        "noise": _first_draws(request),
    }
    if request.output is OutputKind.UINT8:
        made["uint8"] = torch.cat(pixels)
        made["video"], _ = pipeline.model.vae.decode(made["latents"], DecoderState.fresh())
    return made


def _camera_tensors(rollout: Rollout, pipeline: LingBotWorldCausalDMDPipeline) -> torch.Tensor:
    request = rollout.request
    geometry = VideoGeometry(request.height, request.width)
    track = create_camera_track(request, geometry, dtype=pipeline.model.dtype, device=_CPU)
    state, tensors = track.fresh(), []
    for plan in rollout.plans:
        camera, state = track.next_chunk(state, plan)
        tensors.append(camera)
    return torch.cat(tensors, dim=1)


def _first_draws(request: SessionRequest) -> torch.Tensor:
    """The noise that each chunk begins with: every fourth draw of the session."""
    generator = torch.Generator().manual_seed(request.seed)
    height, width = request.height // SPATIAL_FACTOR, request.width // SPATIAL_FACTOR
    draws = [
        draw_noise(generator, channels=16, height=height, width=width, device=_CPU)
        for _ in range((request.num_chunks or 0) * len(DMD_LABELS))
    ]
    return torch.cat(draws[:: len(DMD_LABELS)], dim=1)
