"""The streaming contract: any cut of a rollout into calls gives the same bits."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from tests.helpers.golden import golden_dir, requires_golden
from tests.helpers.vae_builders import (
    decode_in_calls,
    encode_in_calls,
    random_latents,
    random_pair,
    random_pixels,
    tiny_fields,
    tiny_vae,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.memory import decoder_bytes, encoder_bytes
from vllm_omni.diffusion.models.lingbot_world.vae.state import (
    CoderHistory,
    DecoderState,
    EncoderState,
)
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

# Names and shapes of the published Wan 2.1 VAE: sha256 of its sorted lines "name 96x3x3x3x3".
REAL_LAYOUT_SHA256 = "e4846f12238ae66790654022a66e7383af12a6ea7e2ec084e39abd5feb5701fd"
REAL_TENSORS = 194
REAL_ELEMENTS = 126_892_531


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("path", ["stacked", "conv3d"])
@pytest.mark.parametrize("plan", [[3, 3], [1, 5], [2, 1, 3], [1] * 6])
def test_decode_plans_agree_bitwise(path: str, plan: list[int]):
    latents = random_latents(6, 64, 96)
    whole, state = tiny_vae(path).decode(latents, DecoderState())
    assert whole.shape == (3, 21, 64, 96)
    assert state.latent_frames == 6
    assert torch.equal(decode_in_calls(tiny_vae(path), latents, plan), whole)


@pytest.mark.parametrize("plan", [[9, 12], [1, 20], [5, 4, 12], [13, 8]])
def test_encode_plans_agree_bitwise(plan: list[int]):
    pixels = random_pixels(21, 48, 80)
    whole, state = tiny_vae().encode(pixels, EncoderState())
    assert whole.shape == (16, 6, 6, 10)
    assert state.latent_frames == 6
    assert torch.equal(encode_in_calls(tiny_vae(), pixels, plan), whole)


def test_bfloat16_streams_bitwise_and_near_float32():
    """Bitwise within bfloat16; against float32 lossy: 8 bits over some 40 layers."""
    latents = random_latents(4, 48, 64)
    vae = tiny_vae("auto", torch.bfloat16)
    whole, state = vae.decode(latents, DecoderState())
    assert whole.dtype == torch.bfloat16
    assert torch.equal(decode_in_calls(vae, latents, [1, 3]), whole)
    exact, exact_state = tiny_vae().decode(latents, DecoderState())
    assert (whole.float() - exact).abs().max() < 0.1
    assert (whole.float() - exact).abs().mean() < 0.01
    assert 2 * state.bytes() == exact_state.bytes()
    encoded, _ = vae.encode(whole, EncoderState())
    assert encoded.dtype == torch.bfloat16
    assert encoded.isfinite().all()


def test_interleaved_sessions_equal_each_alone_bitwise():
    vae = tiny_vae()
    latents = {name: random_latents(9, 48, 64, seed) for name, seed in (("a", 1), ("b", 2))}
    alone = {name: decode_in_calls(vae, clip, [3, 3, 3]) for name, clip in latents.items()}
    states = dict.fromkeys(latents, DecoderState())
    videos: dict[str, list[torch.Tensor]] = {name: [] for name in latents}
    for chunk in range(3):
        for name, clip in latents.items():
            video, states[name] = vae.decode(clip[:, 3 * chunk : 3 * chunk + 3], states[name])
            videos[name].append(video)
    for name, parts in videos.items():
        assert torch.equal(torch.cat(parts, dim=1), alone[name])


def test_a_state_can_be_continued_twice():
    """A call leaves the state it was given alone: both continuations are equal, bitwise."""
    vae = tiny_vae()
    latents = random_latents(6, 48, 64)
    _, state = vae.decode(latents[:, :3], DecoderState())
    before = [tensor.clone() for tensor in state.tensors()]
    first, _ = vae.decode(latents[:, 3:], state)
    second, _ = vae.decode(latents[:, 3:], state)
    assert torch.equal(first, second)
    assert all(map(torch.equal, before, state.tensors()))


def test_a_failed_call_leaves_the_old_state_usable(monkeypatch: pytest.MonkeyPatch):
    vae = tiny_vae()
    latents = random_latents(6, 48, 64)
    whole, _ = vae.decode(latents, DecoderState())
    _, state = vae.decode(latents[:, :3], DecoderState())
    original, calls = vae.decoder.up_blocks[2].forward, []

    def fails_in_the_second_frame(*args: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(vae.decoder.up_blocks[2], "forward", fails_in_the_second_frame)
        with pytest.raises(RuntimeError, match="out of memory"):
            vae.decode(latents[:, 3:], state)
    video, _ = vae.decode(latents[:, 3:], state)
    assert torch.equal(video, whole[:, 9:])


def test_state_bytes_stay_constant_and_are_all_that_is_kept():
    vae = tiny_vae()
    decoder, encoder = DecoderState(), EncoderState()
    assert decoder.bytes() == encoder.bytes() == 0
    sizes, kept = [], []
    for chunk in range(4):
        _, decoder = vae.decode(random_latents(3, 64, 96, chunk), decoder)
        _, encoder = vae.encode(random_pixels(9 if chunk == 0 else 12, 64, 96), encoder)
        sizes.append((decoder.bytes(), encoder.bytes()))
        tensors = [*decoder.tensors(), *encoder.tensors()]
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    # Two input frames of each convolution; one for a temporal downsampler.
    assert set(sizes) == {(4_853_760, 3_010_560)}
    assert set(kept) == {4_853_760 + 3_010_560}
    assert decoder_bytes(vae.config, vae.dtype, 64, 96).state == 4_853_760
    assert encoder_bytes(vae.config, vae.dtype, 64, 96).state == 3_010_560


def test_state_bytes_at_full_scale():
    histories, quarter = (
        sum(
            count(real_config(), torch.bfloat16, *size).state
            for count in (encoder_bytes, decoder_bytes)
        )
        for size in ((480, 832), (240, 416))
    )
    assert histories == 4 * quarter
    assert histories / 2**20 == pytest.approx(2870.5, abs=0.1)


def test_every_convolution_of_a_device_reads_its_weight_channels_last():
    """Temporal ones, too: else the library copies frames into another layout and back."""
    with torch.device("meta"):
        vae = WanVAE(real_config(), conv_path="conv3d").to(torch.bfloat16)
    vae.prepare()
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = {
        name: weight
        for name, weight in vae.named_parameters()
        if name.endswith("weight") and weight.dim() in layouts and weight[0, 0].numel() > 1
    }
    assert {tuple(weight.shape[2:]) for weight in kernels.values()} == {
        (3, 3), (3, 1, 1), (3, 3, 3),
    }  # fmt: skip
    for name, weight in kernels.items():
        assert weight.is_contiguous(memory_format=layouts[weight.dim()]), name
        assert weight.stride(1) == 1, name


def test_activations_at_full_scale_are_counted():
    """Bound: 24 to 26 tensors of one full frame at the base width, as bfloat16."""
    whole, quarter = (
        decoder_bytes(real_config(), torch.bfloat16, 480, width).activations for width in (832, 208)
    )
    frame = 480 * 832 * 96 * 2
    assert 24 * frame < whole < 26 * frame
    assert quarter < whole / 3
    # Less than a decode of whole frames, more than that of a rank among four.
    assert quarter < encoder_bytes(real_config(), torch.bfloat16, 480, 832).activations < whole


def test_first_frame_makes_one_pixel_frame_and_layout_is_ready_for_pixels():
    vae = tiny_vae()
    first, state = vae.decode(random_latents(1, 32, 48), DecoderState())
    second, _ = vae.decode(random_latents(1, 32, 48), state)
    assert first.shape == (3, 1, 32, 48)
    assert second.shape == (3, 4, 32, 48)
    assert second.permute(1, 2, 3, 0).is_contiguous()
    assert second.abs().max() <= 1.0


@pytest.mark.parametrize(
    ("pixel_frames", "started", "needed"),
    [(0, False, "1 + 4k"), (4, False, "1 + 4k"), (8, False, "1 + 4k"), (0, True, "4k"),
     (9, True, "4k")],
)  # fmt: skip
def test_encode_refuses_partial_latent_frames(pixel_frames: int, started: bool, needed: str):
    state = EncoderState()
    if started:
        _, state = tiny_vae().encode(random_pixels(1, 16, 16), state)
    with pytest.raises(ValueError, match="pixel frames here, got") as refusal:
        tiny_vae().encode(random_pixels(pixel_frames, 16, 16), state)
    assert f"takes {needed} pixel" in str(refusal.value)


def test_encode_refuses_partial_latents():
    with pytest.raises(ValueError, match="multiples of 8 pixels, got 20x16"):
        tiny_vae().encode(random_pixels(1, 16, 20), EncoderState())


def test_histories_compare_by_bits():
    _, state = tiny_vae().encode(random_pixels(1, 16, 16), EncoderState())
    _, again = tiny_vae().encode(random_pixels(1, 16, 16), EncoderState())
    _, other = tiny_vae().encode(random_pixels(1, 16, 16, seed=1), EncoderState())
    assert state.same_history(again)
    assert not state.same_history(other)
    assert not state.same_history(EncoderState())
    first, *others = state.history.frames
    negated, zeroed = (
        replace(state, history=CoderHistory((first * zero, *others))) for zero in (-0.0, 0.0)
    )
    assert not negated.same_history(zeroed)


def test_prepare_again_after_a_move_to_another_dtype():
    vae, _ = random_pair(3, base_dim=4, num_res_blocks=1)
    moved = WanVAE(vae.config)
    moved.load_state_dict(vae.state_dict())
    moved.prepare()
    moved.to(torch.bfloat16).prepare()
    assert moved.dtype == torch.bfloat16
    video, _ = moved.decode(random_latents(1, 16, 16), DecoderState())
    assert video.dtype == torch.bfloat16


def real_config() -> VaeConfig:
    return VaeConfig.from_json({**tiny_fields(), "base_dim": 96})


def layout(vae: WanVAE) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in vae.state_dict().items()}


def test_real_layout_has_the_published_names_and_shapes():
    with torch.device("meta"):
        vae = WanVAE(real_config())
    names = layout(vae)
    lines = "\n".join(sorted(f"{n} {'x'.join(map(str, s))}" for n, s in names.items()))
    assert len(names) == REAL_TENSORS
    assert sum(tensor.numel() for tensor in vae.state_dict().values()) == REAL_ELEMENTS
    assert hashlib.sha256(lines.encode()).hexdigest() == REAL_LAYOUT_SHA256
    vae.prepare()
    assert layout(vae) == names


@requires_golden
def test_real_layout_equals_the_given_list():
    directory = golden_dir()
    assert directory is not None
    given = json.loads((directory / "real_14b_names.json").read_text())["vae"]["shapes"]
    with torch.device("meta"):
        assert layout(WanVAE(real_config())) == given
