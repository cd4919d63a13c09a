"""Picture to condition: preparation, chunk-wise encoding, and the fixed point."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.golden import assert_matches, golden_dir, load_set, requires_golden
from tests.helpers.vae_builders import tiny_vae
from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.diffusion.models.lingbot_world.condition import (
    ConditionEncoder,
    ConditionState,
    prepare_image,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")
FIXED_POINT_CHUNK = 10
"""With the tiny checkpoint at 64x96."""


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def noise_picture(height: int, width: int, seed: int = 0) -> SourceImage:
    generator = np.random.default_rng(seed)
    return SourceImage(rgb=generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoder_for(
    height: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> ConditionEncoder:
    geometry = VideoGeometry(height, width)
    vae = tiny_vae("auto", dtype)
    image = prepare_image(noise_picture(height, width, seed), geometry, CPU, dtype)
    return ConditionEncoder(vae, image, dtype)


def test_same_size_is_only_mapped():
    """Exact: byte / 255 in float32, doubled, minus one."""
    picture = noise_picture(32, 48)
    pixels = prepare_image(picture, VideoGeometry(32, 48), CPU, torch.float32)
    expected = picture.rgb.astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)


def test_resizing_keeps_the_overshoot_of_sharp_edges():
    rgb = np.zeros((40, 40, 3), np.uint8)
    rgb[:, 20:] = 255
    pixels = prepare_image(SourceImage(rgb=rgb), VideoGeometry(32, 64), CPU, torch.float32)
    assert pixels.shape == (3, 32, 64)
    assert pixels.max() > 1.01
    assert pixels.min() < -1.01


def test_signed_pictures_take_the_same_way():
    """Bitwise: only the mapping is skipped."""
    picture = noise_picture(40, 56)
    geometry = VideoGeometry(32, 48)
    signed = (picture.rgb.astype(np.float32) / np.float32(255)) * np.float32(2) - np.float32(1)
    both = [
        prepare_image(source, geometry, CPU, torch.float32)
        for source in (picture, SourceImage(signed=signed))
    ]
    assert torch.equal(*both)


def test_dtype_is_rounded_last():
    picture = noise_picture(40, 56)
    geometry = VideoGeometry(32, 48)
    wide = prepare_image(picture, geometry, CPU, torch.float32)
    assert torch.equal(prepare_image(picture, geometry, CPU, torch.bfloat16), wide.bfloat16())


def test_condition_equals_a_whole_clip_encode_bitwise():
    conditions = encoder_for(48, 64)
    state, chunks = conditions.fresh(), []
    for _ in range(3):
        condition, state = conditions.next_chunk(state)
        chunks.append(condition)
    clip = torch.zeros(3, 33, 48, 64)
    clip[:, 0] = conditions.image
    latents, _ = tiny_vae().encode(clip, EncoderState())
    whole = torch.cat(chunks, dim=1)
    assert torch.equal(whole[4:], latents)
    assert torch.equal(whole[:4, 0], torch.ones(4, 6, 8))
    assert whole[:4, 1:].count_nonzero() == 0


def test_fixed_point_is_reached_and_frees_the_history():
    conditions = encoder_for(64, 96)
    state = conditions.fresh()
    for chunk in range(FIXED_POINT_CHUNK + 1):
        assert state.fixed is None, f"too early: chunk {chunk}"
        condition, state = conditions.next_chunk(state)
    assert state.fixed is condition
    assert state.encoder is None
    assert state.bytes() == condition.nbytes
    repeated, after = conditions.next_chunk(state)
    assert repeated is condition
    assert after == ConditionState(FIXED_POINT_CHUNK + 2, None, condition)


def test_a_history_that_changes_is_told_by_one_comparison(monkeypatch):
    """On a device each of them waits for all work that is queued."""
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    encoder = encoder_for(64, 96)
    state = encoder.fresh()
    for chunk in range(FIXED_POINT_CHUNK):
        compared.clear()
        _, state = encoder.next_chunk(state)
        assert len(compared) == min(chunk, 1)


def test_fixed_condition_is_what_the_encoder_would_go_on_to_make():
    """Bitwise, against an encoder that never stops."""
    conditions = encoder_for(64, 96)
    clip = torch.zeros(3, 9 + 12 * (FIXED_POINT_CHUNK + 2), 64, 96)
    clip[:, 0] = conditions.image
    latents, _ = tiny_vae().encode(clip, EncoderState())
    state = conditions.fresh()
    for chunk in range(FIXED_POINT_CHUNK + 3):
        condition, state = conditions.next_chunk(state)
        assert torch.equal(condition[4:], latents[:, 3 * chunk : 3 * chunk + 3])
    assert state.fixed is not None


def test_a_picture_that_never_changes_is_not_fixed_in_the_first_chunk():
    """The first chunk carries the mask, so it can never stand for later ones."""
    vae = tiny_vae()
    conditions = ConditionEncoder(vae, torch.zeros(3, 32, 32), torch.float32)
    first, state = conditions.next_chunk(conditions.fresh())
    assert state.fixed is None
    second, _ = conditions.next_chunk(state)
    assert first[:4, 0].min() == 1.0
    assert second[:4].max() == 0.0


def test_interleaved_sessions_equal_each_alone_bitwise():
    sessions = [encoder_for(48, 64, seed=seed) for seed in (1, 2)]
    states = [conditions.fresh() for conditions in sessions]
    mixed: list[list[torch.Tensor]] = [[], []]
    for _ in range(3):
        for index, conditions in enumerate(sessions):
            condition, states[index] = conditions.next_chunk(states[index])
            mixed[index].append(condition)
    for conditions, chunks in zip(sessions, mixed, strict=True):
        state = conditions.fresh()
        for condition in chunks:
            alone, state = conditions.next_chunk(state)
            assert torch.equal(alone, condition)


@dataclass(frozen=True)
class Unanimous(RankGroup):
    """Ranks of which another one still sees its history change until a chunk of choice."""

    chunks: Iterator[bool] = field(default_factory=lambda: iter([True] * (FIXED_POINT_CHUNK + 3)))

    def any(self, *, flag: bool) -> bool:
        return next(self.chunks, False) or flag


def test_no_rank_stops_before_all_can():
    conditions = replace(encoder_for(48, 64), ranks=Unanimous(0, 2, None))
    state = conditions.fresh()
    for _ in range(FIXED_POINT_CHUNK + 3):
        _, state = conditions.next_chunk(state)
        assert state.fixed is None
    _, state = conditions.next_chunk(state)
    assert state.fixed is not None


def test_a_condition_made_ahead_is_the_same_and_is_made_once(monkeypatch):
    """Bitwise, up to the fixed point and beyond it."""
    conditions = encoder_for(48, 64)
    plain, ahead = conditions.fresh(), conditions.fresh()
    for _ in range(FIXED_POINT_CHUNK + 3):
        ahead = conditions.make_ahead(ahead)
        wanted, plain = conditions.next_chunk(plain)
        with monkeypatch.context() as patch:
            patch.setattr(WanVAE, "encode", None)
            condition, ahead = conditions.next_chunk(ahead)
        assert torch.equal(condition, wanted)
    assert ahead.fixed is not None


def test_bfloat16_reaches_its_fixed_point_too():
    conditions = encoder_for(48, 64, torch.bfloat16)
    state = conditions.fresh()
    while state.fixed is None and state.next_chunk_index <= FIXED_POINT_CHUNK:
        condition, state = conditions.next_chunk(state)
        assert condition.dtype == torch.bfloat16
    assert state.fixed is not None
    assert state.next_chunk_index >= 2


@requires_golden
@pytest.mark.parametrize("size", [(64, 96), (96, 160), (48, 64)])
def test_golden_image(size: tuple[int, int]):
    directory = golden_dir()
    assert directory is not None
    with Image.open(directory / "inputs" / "image.jpg") as opened:
        picture = SourceImage(rgb=np.asarray(opened.convert("RGB")))
    height, width = size
    pixels = prepare_image(picture, VideoGeometry(height, width), CPU, torch.float32)
    assert_matches(pixels[None], load_set("e_encode_decode"), f"image.{height}x{width}")


@requires_golden
@pytest.mark.parametrize("threads", [1, 2])
def test_golden_condition(threads: int):
    golden = load_set("e_encode_decode")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        image = golden.arrays["image.64x96"][0]
        conditions = ConditionEncoder(tiny_vae(), image, torch.float32)
        state = conditions.fresh()
        for chunk in range(FIXED_POINT_CHUNK + 1):
            assert state.fixed is None
            condition, state = conditions.next_chunk(state)
            if chunk < 6:
                assert_matches(condition[None], golden, f"condition.64x96.chunk{chunk}")
        assert state.fixed is not None
        assert_matches(state.fixed[None], golden, "condition.64x96.fixed_point")
        check_whole(golden, "image.64x96", "condition.64x96.whole18", 69)
        check_whole(golden, "image.96x160", "condition.96x160.whole9", 33)
    finally:
        torch.set_num_threads(before)


def check_whole(golden: object, image: str, name: str, pixel_frames: int) -> None:
    first = golden.arrays[image][0]
    clip = torch.zeros(3, pixel_frames, *first.shape[1:])
    clip[:, 0] = first
    latents, _ = tiny_vae().encode(clip, EncoderState())
    mask = torch.zeros(4, *latents.shape[1:])
    mask[:, 0] = 1.0
    assert_matches(torch.cat([mask, latents])[None], golden, name)
