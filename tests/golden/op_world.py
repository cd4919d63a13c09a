"""Experiments of the whole product: requests as clients make them, on the workers of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.archive import TINY, Archive, RecipeError
from tests.golden.recipe import DTYPES, Job, Keys, Run
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, SPATIAL_FACTOR
from vllm_omni.diffusion.messages import ChunkPlan, SessionRequest, TokenizedPrompt
from vllm_omni.diffusion.models.lingbot_world.camera import create_camera_track
from vllm_omni.diffusion.models.lingbot_world.chunk import DMD_LABELS, draw_noise
from vllm_omni.diffusion.models.lingbot_world.tokenizer import load_tokenizer
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.registry import LINGBOT_WORLD
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.inputs.picture import load_image
from vllm_omni.inputs.request import Door, RequestPolicy

_CPU = torch.device("cpu")
_REQUEST = ("prompt", "image", "height", "width", "num_frames", "seed")


def world(job: Job) -> list[Run]:
    """One request.

    Results are ``latents``, ``uint8``, ``video``, ``condition``, ``camera`` and ``noise``. A stream
    and a clip are the same chunks, so ``stream`` only has to be said.
    """
    keys = job.keys
    keys.flag("stream")
    request = _Request.read(keys.inside("request"), job.archive)
    live = keys.optional("live_poses")
    poses = None if live is None else _live(job.archive.resolved(live))
    ranks = keys.integer("ranks")
    model = keys.optional("model")
    config = _config(job, model, ranks, keys.take("model_config"), sessions=1)
    keys.done()
    made = _Rollouts(config, job).run({"": replace(request, live=poses)}, None)[""]
    return [Run(job.rank, made)]


def sessions(job: Job) -> list[Run]:
    """Several sessions on one worker, whose chunks are made in the order that is given.

    Results are ``NAME`` or ``NAME/latents`` for the latents, and ``NAME/uint8``. A session may
    leave out what ``request`` of the recipe says for all.
    """
    keys, archive = job.keys, job.archive
    common = keys.optional("request") or {}
    requests = {
        name: _Request.read(
            Keys({**common, **_flattened(said)}, f"{job.recipe.name}, {name}"), archive
        )
        for name, said in keys.take("sessions").items()
    }
    order, ranks = keys.take("order"), keys.optional("ranks") or 1
    config = _config(
        job, keys.optional("model"), ranks, keys.optional("model_config") or {}, len(requests)
    )
    keys.done()
    made: dict[str, torch.Tensor] = {}
    for name, parts in _Rollouts(config, job).run(requests, order).items():
        made[name] = parts["latents"]
        made |= {f"{name}/{part}": array for part, array in parts.items()}
    return [Run("", made)]


@dataclass(frozen=True)
class _Request:
    """A request by the product's own parser, and the poses of a live camera by chunk."""

    request: SessionRequest
    live: Sequence[np.ndarray] | None = None

    @classmethod
    def read(cls, keys: Keys, archive: Archive) -> "_Request":
        given = {name: keys.take(name) for name in _REQUEST}
        given["extra_args"] = dict(archive.resolved(keys.optional("extra_args") or {}))
        script, is_reversed = keys.optional("script"), keys.optional("reversed")
        if script is not None:
            chunks = archive.resolved(script)
            given["extra_args"]["camera_action_script"] = chunks[::-1] if is_reversed else chunks
        keys.done()
        given["prompt"] = archive.text(given["prompt"])
        policy = RequestPolicy(LINGBOT_WORLD.limits, action_root=str(archive.root))
        door = Door(policy, lambda _: None, load_image, TokenizedPrompt, {})
        checked = door.check({**given, "image": archive.picture(given["image"])})
        return cls(door.complete(checked, door.picture(checked.image)))

    def plan(self, name: str, chunk: int) -> ChunkPlan:
        """The plan of one chunk."""
        return ChunkPlan(name, chunk, poses=None if self.live is None else self.live[chunk])


class _Rollouts:
    """Requests on one worker of this rank, chunk by chunk."""

    def __init__(self, config: OmniDiffusionConfig, job: Job) -> None:
        rank = job.parallel.control.rank
        self.worker = Worker(config, local_rank=rank, parallel=job.parallel)
        self.tokenize = load_tokenizer(Path(config.model))
        self.wanted = job.wanted

    def run(
        self, requests: Mapping[str, _Request], order: Sequence[str] | None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """The parts of each rollout.

        Args:
            order: whose chunk is made next; ``None`` for one rollout after the other.
        """
        lengths = {name: each.request.num_chunks or 0 for name, each in requests.items()}
        turns = list(order or [name for name in requests for _ in range(lengths[name])])
        if any(name not in lengths or turns.count(name) > lengths[name] for name in turns):
            raise RecipeError(f"order {turns} goes beyond the chunks of the sessions: {lengths}")
        made: dict[str, _Parts] = {name: _Parts() for name in requests}
        for name, each in requests.items():
            prompt = self.tokenize(each.request.prompt.text)
            self.worker.open_session(name, replace(each.request, prompt=prompt))
        for name in turns:
            made[name].add(self.worker, name, requests[name])
        results = {name: self._results(requests[name], made[name]) for name in set(turns)}
        self.worker.shutdown()
        return results

    def _results(self, request: _Request, parts: "_Parts") -> dict[str, torch.Tensor]:
        latents = torch.cat(parts.latents, dim=1)
        results = {"latents": latents, "condition": torch.cat(parts.conditions, dim=1)}
        if parts.pixels:
            results["uint8"] = torch.cat(parts.pixels)
        if "video" in self.wanted:
            vae = self.worker.pipeline.model.vae
            results["video"], _ = vae.decode(latents, DecoderState())
        if "camera" in self.wanted:
            results["camera"] = _camera(request, self.worker.pipeline.dtype)
        if "noise" in self.wanted:
            results["noise"] = _first_draws(request.request)
        return results


class _Parts:
    """What the chunks of one rollout have made so far."""

    def __init__(self) -> None:
        self.latents: list[torch.Tensor] = []
        self.conditions: list[torch.Tensor] = []
        self.pixels: list[torch.Tensor] = []

    def add(self, worker: Worker, name: str, request: _Request) -> None:
        """Make one more chunk; only the root rank has its pixels."""
        session, pipeline = worker.sessions[name], worker.pipeline
        pixels, _ = pipeline.denoise_chunk(session, request.plan(name, len(self.latents)))
        self.latents.append(session.pending.clean)
        self.conditions.append(session.pending.condition)
        if pixels is not None:
            self.pixels.append(pixels.clone())
        pipeline.commit_chunk(session)


def _config(
    job: Job, model: Any, ranks: int, model_config: Mapping[str, Any], sessions: int
) -> OmniDiffusionConfig:
    checkpoint = TINY
    if model is not None:
        keys = Keys(model, f"{job.recipe.name}, model")
        checkpoint = keys.text("checkpoint")
        keys.done()
    names = {dtype: name for name, dtype in DTYPES.items()}
    overrides = {
        "dtype": names[job.dtype_of_outputs()],
        "ulysses_degree": ranks,
        "max_num_seqs": sessions,
        "model_config": dict(model_config),
    }
    return resolve(str(job.archive.checkpoint(checkpoint)), overrides=overrides).config


def _flattened(said: Mapping[str, Any]) -> dict[str, Any]:
    """A session's own values, whether they stand in ``request`` or beside it."""
    return {**said.get("request", {}), **{k: v for k, v in said.items() if k != "request"}}


def _live(noted: Sequence[Any]) -> list[np.ndarray]:
    """Poses by chunk: the first chunk stands still, what is noted after chunk c is chunk c + 1."""
    still = np.tile(np.eye(4), (LATENT_FRAMES_PER_CHUNK, 1, 1))
    return [still, *(np.array(poses) for poses in noted if poses is not None)]


def _camera(request: _Request, dtype: torch.dtype) -> torch.Tensor:
    track = create_camera_track(request.request, request.request.geometry, dtype=dtype, device=_CPU)
    state, tensors = track.fresh(), []
    for chunk in range(request.request.num_chunks or 0):
        camera, state = track.next_chunk(state, request.plan("", chunk))
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
