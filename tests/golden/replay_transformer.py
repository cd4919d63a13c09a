"""Replays transformer rollouts: probes, commits, the KV window and intermediate activations."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.golden.archive import Archive
from tests.golden.report import Made
from tests.golden.taps import RecordingAttention, Taps
from tests.golden.transformer_case import Case, Name, parse, split_cases
from tests.helpers.golden import GoldenSet
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE
from vllm_omni.diffusion.geometry import (
    LATENT_FRAMES_PER_CHUNK,
    SPATIAL_FACTOR,
    VideoGeometry,
)
from vllm_omni.diffusion.layers.linear import PlainLinearMethod
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DmdSchedule,
    commit,
    denoise,
)
from vllm_omni.diffusion.models.lingbot_world.load import load_transformer
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import KVCacheSpec
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV

_LATENTS = 16
_CPU = torch.device("cpu")
_STORED = re.compile(r".*layer(?P<layer>\d+)\.(?P<part>key|value|k|v)")
_TEXT = re.compile(r"(?:text|cross)(?:_?kv)?\..*")
_CHUNK = re.compile(r"chunk(\d+)")


def claim(golden: GoldenSet, names: Sequence[str]) -> list[str]:
    """Names of this family."""
    given = [n for n in golden.arrays if golden.manifest["arrays"][n].get("role") == "input"]
    inputs = [name for name in given if parse(name).key.endswith("hidden_states")]
    outputs = [name for name in names if parse(name).is_output]
    return [*outputs, *inputs] if outputs else []


def replay(golden: GoldenSet, names: Sequence[str], archive: Archive) -> Iterator[tuple[str, Made]]:
    """Make the named arrays; given inputs of single calls are made too where the seed is known."""
    for case in split_cases(golden, names, archive):
        rollout = _Rollout(case, archive)
        made: dict[str, torch.Tensor] = {}
        for chunk in range(_chunks(case)):
            made |= rollout.chunk(chunk)
        for name in case.outputs:
            value = rollout.stored(name) if _TEXT.fullmatch(name.key) else made.get(name.key)
            if value is not None:
                yield name.full, _part_of_rank(value, golden.arrays[name.full], name)


def _chunks(case: Case) -> int:
    """Chunks that the wanted arrays reach, or all where one is of the end of the rollout."""
    given = case.condition.shape[1] // LATENT_FRAMES_PER_CHUNK
    found = [_CHUNK.search(name.key) for name in case.outputs]
    return given if None in found else 1 + max(int(match[1]) for match in found)


def _part_of_rank(made: torch.Tensor, expected: torch.Tensor, name: Name) -> torch.Tensor:
    """The share of a rank: its heads, or its tokens, whichever axis is shorter in the set."""
    if name.rank is None:
        return made
    for axis in range(1, min(made.dim(), expected.dim()) + 1):
        share = expected.shape[-axis]
        if made.shape[-axis] != share:
            return made.narrow(made.dim() - axis, name.rank * share, share)
    return made


class _Rollout:
    """One transformer, one session, and what the wanted arrays need of it."""

    def __init__(self, case: Case, archive: Archive) -> None:
        self.case = case
        self.attention = RecordingAttention(create_attention_backend("sdpa"))
        self.transformer = _load(case, self.attention, archive)
        self.geometry = VideoGeometry(*(SPATIAL_FACTOR * s for s in case.condition.shape[-2:]))
        self.schedule = DmdSchedule.with_shift(case.flow_shift)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.taps = Taps(self.transformer, self.attention)
        self.text = self.transformer.embed_text(case.prompt_embeds)
        self.pool = _pool(case, self.geometry)
        self.kv = SessionKV(self.pool, self.geometry.tokens_per_frame)
        self.keys = {name.key for name in case.outputs}
        self.redrawn = True
        self._made: dict[str, torch.Tensor] = {}
        self._calls: list[str] = []
        self.transformer.register_forward_pre_hook(self._before)
        self.transformer.register_forward_hook(self._after)

    def chunk(self, index: int) -> dict[str, torch.Tensor]:
        """Run one chunk as the product does, and the commit's full forward if one is wanted."""
        self._made = {}
        start = LATENT_FRAMES_PER_CHUNK * index
        frames = slice(start, start + LATENT_FRAMES_PER_CHUNK)
        condition = self.case.condition[:, frames]
        context = self._context(start, self.case.camera[:, frames])
        steps = [self._time(time) for time in (*self.schedule.timesteps, COMMIT_TIMESTEP)]
        self._calls = [f"chunk{index}.step{s}" for s in range(len(self.schedule.timesteps))]
        clean = denoise(
            self.transformer,
            condition=condition,
            context=context,
            schedule=self.schedule,
            steps=tuple(steps),
            generator=self.generator,
        )
        clean = self._made[f"chunk{index}.x0"] = self._clean(index, clean)
        if not self.case.reuse_last_step:
            self._commit(index, clean, condition, context, steps[-1])
        self._keep_stored(index)
        return self._made

    def stored(self, name: Name) -> torch.Tensor:
        """Keys or values of the prompt."""
        match = _STORED.fullmatch(name.key)
        pair = self.text[int(match["layer"])]
        return pair.key if match["part"].startswith("k") else pair.value

    def _commit(
        self,
        index: int,
        clean: torch.Tensor,
        condition: torch.Tensor,
        context: ChunkContext,
        step: object,
    ) -> None:
        call = f"chunk{index}.commit"
        given = self.case.inputs.get(f"{call}.hidden_states")
        if any(key.startswith(f"{call}.") for key in self.keys):
            self._calls = [call]
            latents = torch.cat((clean.to(condition.dtype), condition))
            self.transformer(latents, step, context)
        # The golden input where there is one, so that the cache is judged apart from the probes.
        clean = clean if given is None else given[:_LATENTS].float()
        commit(self.transformer, clean=clean, condition=condition, context=context, step=step)

    def _clean(self, index: int, clean: torch.Tensor) -> torch.Tensor:
        if self.redrawn:
            return clean
        last = f"chunk{index}.step{len(self.schedule.sigmas) - 1}"
        noisy = self.case.inputs[f"{last}.hidden_states"][:_LATENTS].float()
        return noisy - self.schedule.sigmas[-1] * self._made[f"{last}.flow"].float()

    def _context(self, start: int, camera: torch.Tensor) -> ChunkContext:
        context = self.transformer.context(
            camera, self.text, self.kv, geometry=self.geometry, start_latent_frame=start
        )
        self.start, self.rotary = start, context.rotary
        return context

    def _time(self, timestep: float) -> object:
        return self.transformer.embed_time(torch.tensor([timestep], dtype=torch.float32))

    def _before(self, _: torch.nn.Module, arguments: tuple) -> tuple:
        """Swap the call's input for the given one; note what the product's own would have been."""
        latents, *rest = arguments
        key = f"{self._calls[0]}.hidden_states"
        given = self.case.inputs.get(key)
        self.taps.clear_calls()
        if given is None:
            return arguments
        if key.endswith("step0.hidden_states"):
            self.redrawn &= torch.equal(given[:_LATENTS], latents[:_LATENTS])
        if self.redrawn:
            self._made[key] = latents
        return (given.to(latents.dtype), *rest)

    def _after(self, _module: torch.nn.Module, _arguments: tuple, flow: torch.Tensor) -> None:
        call = self._calls.pop(0)
        self._made[f"{call}.flow"] = flow
        wanted = {key for key in self.keys if key.startswith(f"{call}.")}
        if wanted - {f"{call}.flow", f"{call}.hidden_states"}:
            # Time is embedded before the calls, so this call's own is embedded once more.
            self._time(self._timestep(call))
            taps = self.taps.snapshot(flow, self.kv, self.rotary, self.start)
            self._made |= {f"{call}.{name}": value for name, value in taps.items()}

    def _timestep(self, call: str) -> float:
        step = re.search(r"step(\d+)", call)
        return COMMIT_TIMESTEP if step is None else self.schedule.timesteps[int(step[1])]

    def _keep_stored(self, chunk: int) -> None:
        """Chronological keys and values after this chunk, where they are wanted."""
        for key in self.keys:
            match, at = _STORED.fullmatch(key), _CHUNK.search(key)
            if match is None or _TEXT.fullmatch(key) or (at and int(at[1]) != chunk):
                continue
            frames = LATENT_FRAMES_PER_CHUNK * (chunk + 1)
            keys, values = self.kv.chronological(int(match["layer"]), frames)
            self._made[key] = keys if match["part"].startswith("k") else values


def _load(
    case: Case, attention: RecordingAttention, archive: Archive
) -> CausalLingBotWorldTransformer3DModel:
    parts = LayerParts(
        config=case.config,
        dtype=case.dtype,
        linear=PlainLinearMethod(),
        backend=attention,
        tensor_parallel=SINGLE,
        exchange=UlyssesExchange(SINGLE),
    )
    if case.weights is None:
        return load_transformer(archive.checkpoint, parts, _CPU)
    with tempfile.TemporaryDirectory(prefix="golden-weights-") as scratch:
        folder = Path(scratch) / "transformer"
        folder.mkdir()
        save_file(dict(case.weights), folder / "diffusion_pytorch_model.safetensors")
        return load_transformer(Path(scratch), parts, _CPU)


def _pool(case: Case, geometry: VideoGeometry) -> KVPool:
    config = case.config
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_attention_heads,
        text_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        window_frames=config.window.window_frames,
        sink_frames=config.window.sink_frames,
        text_tokens=len(case.prompt_embeds),
        element_bytes=case.dtype.itemsize,
        page_tokens=KVCacheConfig().page_tokens,
    )
    pages = spec.window_pages(geometry.tokens_per_frame)
    return KVPool(spec, pages, dtype=case.dtype, device=_CPU)
