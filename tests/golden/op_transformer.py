"""Experiments of the transformer: whole rollouts from a seed, and single forwards.

Each is done twice, with the pages of the window in a row and with scattered pages. A commit is
done as the product does it, where the last layer stops at its keys and values; where a recipe wants
the flow of a commit, the whole forward comes after it and has to leave the same bits in the window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.golden.archive import Archive, RecipeError
from tests.golden.model import Model, Session
from tests.golden.recipe import Job, Keys, Run
from tests.golden.taps import RecordingAttention, Taps
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DmdSchedule,
    commit,
    denoise,
)
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)

_LAYOUTS = {"pages in a row": False, "scattered pages": True}


def rollout(job: Job) -> list[Run]:
    """A rollout from noise, chunk after chunk.

    Results are ``x0/C``, ``flow/C/S``, ``commit/C``, ``key/C/L`` and ``value/C/L`` (with ``/rankR``
    where there are several ranks), ``text_key/L``, ``text_value/L``, ``tap/C/S/NAME``.
    """
    plan = _RolloutPlan.read(job)
    return [
        Run(_label(layout, job), _Rollout(plan, job, scattered).run())
        for layout, scattered in _LAYOUTS.items()
    ]


def forwards(job: Job) -> list[Run]:
    """Single calls with given inputs, one session for each sample of a batch.

    Results are ``flow/CALL``, and after a commit ``key/CALL/L`` and ``value/CALL/L``.
    """
    model = Model.read(job.keys.inside("model"), job.archive)
    calls = [
        _Call.read(Keys(call, f"{job.recipe.name}, call {index}"), job.archive)
        for index, call in enumerate(job.keys.take("calls"))
    ]
    dtype = job.dtype_of_outputs()
    job.keys.optional("ranks")
    job.keys.done()
    return [
        Run(_label(layout, job), _Forwards(model, dtype, job, scattered).run(calls))
        for layout, scattered in _LAYOUTS.items()
    ]


@dataclass(frozen=True)
class _RolloutPlan:
    """What a rollout needs, without its batch axis."""

    model: Model
    condition: torch.Tensor
    camera: torch.Tensor
    prompt_embeds: torch.Tensor
    schedule: DmdSchedule
    seed: int
    chunks: int
    dtype: torch.dtype
    first_frame: int

    @classmethod
    def read(cls, job: Job) -> "_RolloutPlan":
        keys, inputs = job.keys, job.keys.inside("inputs")
        job.keys.integer("ranks")
        plan = cls(
            model=Model.read(keys.inside("model"), job.archive),
            condition=job.archive.tensor(inputs.text("condition"))[0],
            camera=job.archive.tensor(inputs.text("camera"))[0],
            prompt_embeds=job.archive.tensor(inputs.text("prompt_embeds"))[0],
            schedule=DmdSchedule.with_shift(keys.number("flow_shift")),
            seed=keys.integer("seed"),
            chunks=keys.integer("chunks"),
            dtype=job.dtype(),
            first_frame=keys.integer("first_frame") if keys.has("first_frame") else 0,
        )
        inputs.done()
        keys.done()
        return plan

    def chunk(self, index: int) -> slice:
        return slice(LATENT_FRAMES_PER_CHUNK * index, LATENT_FRAMES_PER_CHUNK * (index + 1))


class _Rollout:
    """One rollout with one layout of pages."""

    def __init__(self, plan: _RolloutPlan, job: Job, scattered: bool) -> None:
        self.plan, self.wanted, self.parallel = plan, job.wanted, job.parallel
        self.attention = RecordingAttention(create_attention_backend("sdpa"))
        self.transformer = plan.model.load(plan.dtype, self.attention, job.parallel)
        self.taps = Taps(self.transformer, self.attention)
        self.session = Session(
            self.transformer, _geometry(plan.condition), plan.prompt_embeds, scattered=scattered
        )
        self.made: dict[str, torch.Tensor] = {}
        self._calls: Iterator[tuple[str, float]] = iter(())
        self.transformer.register_forward_pre_hook(lambda *_: self.taps.clear_calls())
        self.transformer.register_forward_hook(self._after)

    def run(self) -> dict[str, torch.Tensor]:
        """All results."""
        for layer, text in enumerate(self.session.text):
            self.made[f"text_key/{layer}"] = text.key
            self.made[f"text_value/{layer}"] = text.value
        generator = torch.Generator().manual_seed(self.plan.seed)
        for index in range(self.plan.chunks):
            self._chunk(index, generator)
        return self.made

    def _chunk(self, index: int, generator: torch.Generator) -> None:
        plan, frames = self.plan, self.plan.chunk(index)
        start = plan.first_frame + frames.start
        condition = plan.condition[:, frames].to(plan.dtype)
        self.context = self.session.context(plan.camera[:, frames], start)
        self.start = frames.start
        times = (*plan.schedule.timesteps, COMMIT_TIMESTEP)
        steps = [_embed(self.transformer, [time]) for time in times]
        self._calls = iter([(f"{index}/{s}", times[s]) for s in range(len(plan.schedule.sigmas))])
        clean = self.made[f"x0/{index}"] = denoise(
            self.transformer,
            condition=condition,
            context=self.context,
            schedule=plan.schedule,
            steps=tuple(steps),
            generator=generator,
        )
        self.session.committed(start, LATENT_FRAMES_PER_CHUNK)
        commit(
            self.transformer,
            clean=clean,
            condition=condition,
            context=self.context,
            step=steps[-1],
        )
        _keep_stored(self.made, index, self.session, self.parallel)
        if f"commit/{index}" in self.wanted:
            self._calls = iter([(f"{index}/commit", COMMIT_TIMESTEP)])
            latents = torch.cat((clean.to(condition.dtype), condition))
            with _same_bits(self.session, f"the commit of chunk {index}"):
                self.transformer(latents, steps[-1], self.context)
            self.made[f"commit/{index}"] = self.made.pop(f"flow/{index}/commit")

    def _after(self, _module: torch.nn.Module, _arguments: tuple, flow: torch.Tensor) -> None:
        call, timestep = next(self._calls)
        self.made[f"flow/{call}"] = flow
        if any(name.startswith(f"tap/{call}/") for name in self.wanted):
            # Time is embedded before the calls, so this call's own is embedded once more.
            _embed(self.transformer, [timestep])
            taps = self.taps.snapshot(flow, self.session.kv, self.context.rotary, self.start)
            self.made |= {f"tap/{call}/{name}": value for name, value in taps.items()}


@dataclass(frozen=True)
class _Call:
    """One call: inputs with their batch, and the timesteps of each sample."""

    hidden_states: torch.Tensor
    camera: torch.Tensor
    prompt_embeds: torch.Tensor
    sample: int | None
    timestep: Any
    start_frame: int
    commit: bool

    @classmethod
    def read(cls, keys: Keys, archive: Archive) -> "_Call":
        call = cls(
            hidden_states=archive.tensor(keys.text("hidden_states")),
            camera=archive.tensor(keys.text("camera")),
            prompt_embeds=archive.tensor(keys.text("prompt_embeds")),
            sample=keys.integer("sample") if keys.has("sample") else None,
            timestep=archive.resolved(keys.take("timestep")),
            start_frame=keys.integer("start_frame"),
            commit=keys.flag("commit"),
        )
        keys.done()
        return call

    @property
    def samples(self) -> range:
        """The samples to call with, each alone: the one that is named, else all."""
        if self.sample is not None:
            return range(self.sample, self.sample + 1)
        return range(len(self.hidden_states))

    def inputs(self, sample: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of one sample; an input without a batch serves all."""
        frames = self.hidden_states.shape[2]
        camera = _of_sample(self.camera, sample)
        first = self.start_frame if camera.shape[1] > frames else 0
        return (
            _of_sample(self.hidden_states, sample),
            camera[:, first : first + frames],
            _of_sample(self.prompt_embeds, sample),
        )

    def times(self, sample: int) -> list[float]:
        """One timestep for all frames, or one for each frame."""
        time = self.timestep
        if isinstance(time, list):
            if len(time) not in {1, len(self.hidden_states)}:
                raise RecipeError(f"timestep {time} is neither one nor one for each sample")
            time = time[sample if len(time) > 1 else 0]
        return [float(each) for each in (time if isinstance(time, list) else [time])]


class _Forwards:
    """Calls of one model, with one layout of pages."""

    def __init__(self, model: Model, dtype: torch.dtype, job: Job, scattered: bool) -> None:
        self.parallel, self.scattered = job.parallel, scattered
        attention = RecordingAttention(create_attention_backend("sdpa"))
        self.transformer = model.load(dtype, attention, job.parallel)
        self.sessions: dict[int, Session] = {}

    def run(self, calls: list[_Call]) -> dict[str, torch.Tensor]:
        """The results of all calls, samples stacked."""
        made: dict[str, torch.Tensor] = {}
        for index, call in enumerate(calls):
            of_samples = [self._call(index, call, sample) for sample in call.samples]
            for name in of_samples[0]:
                made[name] = torch.stack([results[name] for results in of_samples])
        return made

    def _call(self, index: int, call: _Call, sample: int) -> dict[str, torch.Tensor]:
        latents, camera, text = call.inputs(sample)
        if sample not in self.sessions:
            self.sessions[sample] = Session(
                self.transformer, _geometry(latents), text, scattered=self.scattered
            )
        session, frames = self.sessions[sample], latents.shape[1]
        context = session.context(camera, call.start_frame)
        step = _embed(self.transformer, call.times(sample))
        latents = latents.to(self.transformer.dtype)
        made: dict[str, torch.Tensor] = {}
        if not call.commit:
            return {f"flow/{index}": self.transformer(latents, step, context)}
        session.committed(call.start_frame, frames)
        self.transformer.write_window(latents, step, context)
        _keep_stored(made, index, session, self.parallel)
        with _same_bits(session, f"the commit of call {index}"):
            made[f"flow/{index}"] = self.transformer(latents, step, context)
        return made


def _stored(session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [session.stored(layer) for layer in range(len(session.transformer.blocks))]


@contextmanager
def _same_bits(session: Session, what: str) -> Iterator[None]:
    """Refuse a whole forward that leaves other keys and values than the commit before it."""
    before = _stored(session)
    yield
    for kept, now in zip(before, _stored(session), strict=True):
        if not all(map(torch.equal, kept, now)):
            raise AssertionError(f"{what} stored other bits than a whole forward")


def _keep_stored(
    made: dict[str, torch.Tensor], index: int, session: Session, parallel: ParallelState
) -> None:
    """Note what the window holds after a commit."""
    group = parallel.sequence
    share = "" if group.size == 1 else f"/rank{group.rank}"
    for layer, stored in enumerate(_stored(session)):
        for part, array in zip(("key", "value"), stored, strict=True):
            made[f"{part}/{index}/{layer}{share}"] = array


def _embed(transformer: CausalLingBotWorldTransformer3DModel, times: list[float]) -> TimeEmbedding:
    return transformer.embed_time(torch.tensor(times, dtype=torch.float32))


def _of_sample(array: torch.Tensor, sample: int) -> torch.Tensor:
    if sample >= len(array) > 1:
        raise RecipeError(f"an input of {len(array)} samples has no sample {sample}")
    return array[sample if len(array) > 1 else 0]


def _geometry(latents: torch.Tensor) -> VideoGeometry:
    return VideoGeometry(*(SPATIAL_FACTOR * side for side in latents.shape[-2:]))


def _label(layout: str, job: Job) -> str:
    return f"{layout}, {job.rank}" if job.rank else layout
