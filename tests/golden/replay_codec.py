"""Replays text, picture, condition, VAE and pixel arrays."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from tests.golden.archive import Archive, first_fact
from tests.golden.report import Made
from tests.helpers.golden import GoldenSet
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.condition import ConditionEncoder, prepare_image
from vllm_omni.diffusion.models.lingbot_world.load import (
    CheckpointFacts,
    load_vae,
    read_checkpoint,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_float, to_uint8
from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.inputs.picture import load_image

_CPU = torch.device("cpu")
_FAMILY = re.compile(r"(?:text|image|condition|vae|decode|uint8|postprocess)\..+")
_CHUNK = re.compile(r"chunk(\d+)")
_SIZE = re.compile(r"(\d+)x(\d+)")
_MOST_CHUNKS = 64
_TENSOR_CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "u8_0_255": lambda small: small,
    "f_0_1": lambda small: small.float() / 255,
    "f_m1_1": lambda small: small.float() / 255 * 2 - 1,
    "f_0_1_batched": lambda small: (small.float() / 255)[None],
}


def claim(golden: GoldenSet, names: Sequence[str]) -> list[str]:
    """Names of this family, also those that stand behind a prefix that gives latents."""
    prefixes = {
        name.removesuffix("latents")
        for name, entry in golden.manifest["arrays"].items()
        if name.endswith(".latents") and entry.get("role") == "input"
    }
    return [
        name
        for name in names
        if _FAMILY.fullmatch(name) or any(name.startswith(prefix) for prefix in prefixes)
    ]


def replay(golden: GoldenSet, names: Sequence[str], archive: Archive) -> Iterator[tuple[str, Made]]:
    """Make the named arrays."""
    codecs: dict[torch.dtype, _Codec] = {}
    for name in names:
        low = "bf16" in name.split(".") or "bfloat16" in name.split(".")
        dtype = torch.bfloat16 if low else torch.float32
        if dtype not in codecs:
            codecs[dtype] = _Codec(golden, archive, dtype)
        made = codecs[dtype].make(name)
        if made is not None:
            yield name, made


class _Codec:
    """Text encoder and VAE of the checkpoint, loaded when first needed."""

    def __init__(self, golden: GoldenSet, archive: Archive, dtype: torch.dtype) -> None:
        self.golden = golden
        self.archive = archive
        self.dtype = dtype
        self._conditions: dict[tuple[int, int], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._streams: dict[str, list[torch.Tensor]] = {}

    @cached_property
    def text(self) -> TextEncoder:
        return TextEncoder.load(self.archive.checkpoint, dtype=self.dtype, device=_CPU)

    @cached_property
    def facts(self) -> CheckpointFacts:
        return read_checkpoint(self.archive.checkpoint, KVCacheConfig())

    @cached_property
    def vae(self) -> WanVAE:
        return load_vae(self.archive.checkpoint, self.facts.vae, dtype=self.dtype, device=_CPU)

    def make(self, name: str) -> torch.Tensor | None:
        """One array, ``None`` if the name says nothing to this replay."""
        kind = name.partition(".")[0]
        makers = {
            "text": self._text,
            "image": self._image,
            "condition": self._condition,
            "vae": self._vae,
            "uint8": self._uint8,
            "postprocess": self._float,
        }
        return makers.get(kind, self._decode)(name)

    def _text(self, name: str) -> torch.Tensor:
        _, key, what = name.split(".")
        prompt = " ".join(first_fact(self.golden.manifest, "texts")[key]["text"].split())
        if what == "embeds":
            rows = self.golden.arrays[name].shape[-2]
            embedded = self.text.embed(prompt)
            assert not embedded[rows:].any(), "rows of padding tokens are exactly zero"
            return embedded[:rows]
        ids, mask = self.text.tokenize(prompt)
        return ids if what == "input_ids" else mask

    def _image(self, name: str) -> torch.Tensor:
        height, width = self.golden.arrays[name].shape[-2:]
        source: object = self.archive.root / "inputs" / "image.jpg"
        if ".case." in name:
            case = name.rpartition(".")[2]
            if case in _TENSOR_CASES:
                small = self.golden.arrays["image.small_uint8"].permute(2, 0, 1)
                source = _TENSOR_CASES[case](small)
            else:
                source = self.golden.arrays[f"{name}_in"]
        return prepare_image(load_image(source), VideoGeometry(height, width), _CPU, self.dtype)

    def _condition(self, name: str) -> torch.Tensor:
        height, width = (int(side) for side in _SIZE.search(name).groups())
        chunks, fixed = self._condition_chunks(height, width)
        if name.endswith("fixed_point"):
            return fixed
        if chunk := _CHUNK.search(name):
            return chunks[int(chunk[1])]
        wanted = self.golden.arrays[name].shape[2] // LATENT_FRAMES_PER_CHUNK
        tail = [fixed] * (wanted - len(chunks))
        return torch.cat([*chunks, *tail][:wanted], dim=1)

    def _condition_chunks(self, height: int, width: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Conditions of all chunks up to the fixed point, and the fixed point."""
        if (height, width) not in self._conditions:
            picture = load_image(self.archive.root / "inputs" / "image.jpg")
            image = prepare_image(picture, VideoGeometry(height, width), _CPU, self.dtype)
            encoder, state = ConditionEncoder(self.vae, image, self.dtype), ConditionEncoder.fresh()
            chunks: list[torch.Tensor] = []
            while state.fixed is None and len(chunks) < _MOST_CHUNKS:
                condition, state = encoder.next_chunk(state)
                chunks.append(condition)
            assert state.fixed is not None, f"no fixed point in {_MOST_CHUNKS} chunks"
            self._conditions[height, width] = chunks, state.fixed
        return self._conditions[height, width]

    def _vae(self, name: str) -> torch.Tensor | None:
        if name.endswith((".latents_mean", ".latents_std")):
            config = self.facts.vae
            mean = name.endswith("mean")
            return torch.tensor(config.latents_mean if mean else config.latents_std)
        if name.endswith(".moments"):
            clip = self.golden.arrays[name.removesuffix(".moments")][0].to(self.dtype)
            moments, _ = self.vae.encode_moments(clip, EncoderState.fresh())
            return moments.permute(3, 0, 1, 2)
        return self._decode(name)

    def _decode(self, name: str) -> torch.Tensor | None:
        latents = self._latents(name)
        chunk, expected = _CHUNK.search(name), self.golden.arrays[name]
        if chunk is None:
            return self.vae.decode(latents, DecoderState.fresh())[0]
        index = int(chunk[1])
        parts = latents.split(LATENT_FRAMES_PER_CHUNK, dim=1)
        fresh, _ = self.vae.decode(parts[index], DecoderState.fresh())
        alone = index > 0 and fresh.shape[1] == expected.shape[2]
        return fresh if alone else self._stream(latents)[index]

    def _latents(self, name: str) -> torch.Tensor:
        """The input of a decode: the nearest ``latents`` above it, else the set's common one."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            found = self.golden.arrays.get(".".join([*parts[:end], "latents"]))
            if found is not None:
                return found[0]
        found = self.golden.arrays.get("decode.latents")
        found = self.archive.borrow("decode.latents", {}) if found is None else found
        if found is None:
            raise LookupError(f"no set gives the latents of {name}")
        return found[0]

    def _stream(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """Chunks of a streaming decode of ``latents``, computed once per input."""
        key = str(latents.data_ptr())
        if key not in self._streams:
            state, chunks = DecoderState.fresh(), []
            for part in latents.split(LATENT_FRAMES_PER_CHUNK, dim=1):
                pixels, state = self.vae.decode(part, state)
                chunks.append(pixels)
            self._streams[key] = chunks
        return self._streams[key]

    def _uint8(self, name: str) -> torch.Tensor:
        given = self.golden.arrays.get(f"{name}_in")
        if given is not None:
            return to_uint8(given[0])
        index = int(_CHUNK.search(name)[1])
        if "from_bf16" in name:  # rounding is judged alone, on the golden pixels
            golden_pixels = self.golden.arrays[f"decode.stream.chunk{index}"][0]
            return to_uint8(golden_pixels.to(torch.bfloat16))
        return to_uint8(self._stream(self._latents(name))[index])

    def _float(self, name: str) -> torch.Tensor:
        return to_float(self.vae.decode(self._latents(name), DecoderState.fresh())[0])
