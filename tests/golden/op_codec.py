"""Experiments of text encoder and VAE."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.golden.archive import RecipeError
from tests.golden.recipe import Job, Keys, Run
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, prepare_image
from vllm_omni.diffusion.models.lingbot_world.load import load_vae, read_checkpoint
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_float, to_uint8
from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder, padded
from vllm_omni.diffusion.models.lingbot_world.tokenizer import load_tokenizer
from vllm_omni.diffusion.models.lingbot_world.vae.columns import (
    WHOLE_FRAME,
    Columns,
    ColumnShard,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.inputs.checking import normalise_prompt
from vllm_omni.inputs.picture import load_image

_CPU = torch.device("cpu")
_MOST_CHUNKS = 64


def text(job: Job) -> list[Run]:
    """Token ids, mask and embedding of a prompt; ``embeds/N`` are the first N rows of it."""
    checkpoint = _checkpoint(job)
    tokenize = load_tokenizer(checkpoint)
    encoder = TextEncoder.load(checkpoint, dtype=job.dtype(), device=_CPU)
    prompt = normalise_prompt(job.archive.text(job.keys.text("text")))
    job.keys.done()
    tokens = tokenize(prompt).ids
    ids, mask = padded(tokens)
    embedded = encoder.embed(tokens)
    made = {"input_ids": ids, "attention_mask": mask}
    for name in job.wanted - set(made):
        kind, (rows,) = _numbered(name)
        if kind != "embeds":
            raise RecipeError(f"{job.recipe.name}: text makes no {name!r}")
        if embedded[rows:].any():
            raise RecipeError(f"{job.recipe.name}: rows from {rows} on are not exactly zero")
        made[name] = embedded[:rows]
    return [Run("", made)]


def image(job: Job) -> list[Run]:
    """A picture as the model gets it."""
    source: object = job.archive.picture(job.keys.text("image"))
    if isinstance(source, torch.Tensor):
        source = _as_clients_give_it(source, job.keys)
    picture = prepare_image(load_image(source), _geometry(job.keys), _CPU, job.dtype())
    job.keys.done()
    return [Run("", {"pixels": picture})]


def condition(job: Job) -> list[Run]:
    """The condition of a picture, chunk after chunk up to its fixed point.

    Results are ``chunk/C``, ``whole/CHUNKS`` and ``fixed_point``.
    """
    dtype = job.dtype()
    source = load_image(job.archive.picture(job.keys.text("image")))
    picture = prepare_image(source, _geometry(job.keys), _CPU, dtype)
    encoder, state = ConditionEncoder(_vae(job, dtype), picture, dtype), ConditionEncoder.fresh()
    job.keys.done()
    chunks: list[torch.Tensor] = []
    while state.fixed is None and len(chunks) < _MOST_CHUNKS:
        made, state = encoder.next_chunk(state)
        chunks.append(made)
    if state.fixed is None:
        raise RecipeError(f"{job.recipe.name}: no fixed point in {_MOST_CHUNKS} chunks")
    results = {f"chunk/{index}": chunk for index, chunk in enumerate(chunks)}
    results["fixed_point"] = state.fixed
    for name in job.wanted:
        if name.startswith("whole/"):
            count = _numbered(name)[1][0]
            tail = [state.fixed] * (count - len(chunks))
            results[name] = torch.cat([*chunks, *tail][:count], dim=1)
    return [Run("", results)]


def latent_statistics(job: Job) -> list[Run]:
    """Mean and standard deviation of each latent channel."""
    facts = read_checkpoint(_checkpoint(job), KVCacheConfig()).vae
    job.keys.done()
    made = {"mean": torch.tensor(facts.latents_mean), "std": torch.tensor(facts.latents_std)}
    return [Run("", made)]


def encode(job: Job) -> list[Run]:
    """The posterior of a clip."""
    dtype = job.dtype()
    clip = job.tensor("clip")[0].to(dtype)
    vae = _vae(job, dtype)
    job.keys.done()
    moments, _ = vae.encode_moments(clip, EncoderState())
    return [Run("", {"moments": moments.permute(3, 0, 1, 2)})]


def decode(job: Job) -> list[Run]:
    """Pixels of latents, call after call of one stream, on one rank or shared by columns.

    The frames do not depend on how a decoder is split, so ``split`` may also be ``height``: the
    frames that a decoder split by height has made are compared with those of columns.
    """
    keys, archive = job.keys, job.archive
    latents = archive.tensor(keys.text("latents"))[0]
    for axis, key in ((-1, "columns"), (1, "frames")):
        span = keys.optional(key)
        if span is not None:
            latents = latents.narrow(axis, span[0], span[1] - span[0])
    per_call = keys.take("frames_per_call")
    ranks, split = keys.integer("ranks"), keys.optional("split")
    vae = _vae(job, job.dtype_of_outputs())
    keys.done()
    if (split is None) is not (ranks == 1) and split not in {"width", "height"}:
        raise RecipeError(f"{job.recipe.name}: {ranks} ranks need a split: width or height")
    parts = latents.split(per_call or latents.shape[1], dim=1)
    pixels = _stream(vae, parts, _columns(job.parallel, latents.shape[-1]))
    made = {f"pixels/{call}": video for call, video in enumerate(pixels)}
    made |= {f"uint8/{call}": to_uint8(video) for call, video in enumerate(pixels)}
    made |= {f"float/{call}": to_float(video) for call, video in enumerate(pixels)}
    return [Run(job.rank, made)]


def to_bytes(job: Job) -> list[Run]:
    """Decoded pixels, cast to the kind of floats of a decoder, as bytes."""
    video = job.tensor("pixels")[0].to(job.dtype())
    job.keys.done()
    return [Run("", {"uint8": to_uint8(video)})]


def _stream(vae: WanVAE, parts: Sequence[torch.Tensor], columns: Columns) -> list[torch.Tensor]:
    state, made = DecoderState(), []
    for part in parts:
        slab, state = vae.decode(part, state, columns)
        if isinstance(columns, ColumnShard):
            slab = columns.gather(slab.permute(1, 2, 3, 0)).permute(3, 0, 1, 2)
        made.append(slab)
    return made


def _columns(parallel: ParallelState, latent_width: int) -> Columns:
    if parallel.sequence.size == 1:
        return WHOLE_FRAME
    return ColumnShard(parallel.sequence, latent_width)


def _as_clients_give_it(source: torch.Tensor, keys: Keys) -> torch.Tensor:
    """The array as a tensor [3, H, W] of the range that the recipe says, with or without batch."""
    layout, span = keys.text("layout"), keys.text("range")
    if layout not in {"hwc", "chw"} or span not in {"as it is", "0..1", "-1..1"}:
        raise RecipeError(f"{keys.where}: layout {layout!r} or range {span!r} is not known")
    array = source.permute(2, 0, 1) if layout == "hwc" else source
    if span != "as it is":
        array = array.float() / 255
    if span == "-1..1":
        array = array * 2 - 1
    return array[None] if keys.flag("batched") else array


def _checkpoint(job: Job) -> Path:
    model = job.keys.inside("model")
    path = job.archive.checkpoint(model.text("checkpoint"))
    model.done()
    return path


def _vae(job: Job, dtype: torch.dtype) -> WanVAE:
    path = _checkpoint(job)
    return load_vae(path, read_checkpoint(path, KVCacheConfig()).vae, dtype=dtype, device=_CPU)


def _geometry(keys: Keys) -> VideoGeometry:
    return VideoGeometry(keys.integer("height"), keys.integer("width"))


def _numbered(name: str) -> tuple[str, list[int]]:
    """``kind/1/2`` taken apart."""
    kind, *numbers = name.split("/")
    return kind, [int(number) for number in numbers]
