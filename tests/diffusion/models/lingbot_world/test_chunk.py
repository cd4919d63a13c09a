"""The sampler of one chunk against its recurrence, and its draws."""

import pytest
import torch

from tests.helpers.model_builders import (
    SMALL,
    ModelRollout,
    chunk_inputs,
    small_transformer,
)
from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DmdSchedule,
    commit,
    denoise,
    draw_noise,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")
SHAPE = (16, 3, SMALL.latent_height, SMALL.latent_width)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def run(rollout, shift=5.0, seed=3):
    schedule = DmdSchedule.with_shift(shift)
    generator = torch.Generator().manual_seed(seed)
    condition = chunk_inputs(0).noisy[16:].to(rollout.model.dtype)
    clean = denoise(
        rollout.model,
        condition=condition,
        context=rollout.context(0),
        schedule=schedule,
        steps=tuple(rollout.time(t) for t in (*schedule.timesteps, COMMIT_TIMESTEP)),
        generator=generator,
    )
    return clean, condition, schedule, generator


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_denoising_follows_the_recurrence(shift):
    """Up to rounding, in float64 on the same flows and draws."""
    rollout, seen = ModelRollout(small_transformer()), []
    rollout.model.register_forward_hook(lambda _, inputs, flow: seen.append((inputs[0], flow)))
    clean, condition, schedule, _ = run(rollout, shift)
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randn(1, *SHAPE, generator=generator)[0].double() for _ in range(4)]
    x = draws[0]
    for step, (latents, flow) in enumerate(seen):
        torch.testing.assert_close(latents[:16].double(), x, rtol=1e-5, atol=1e-5)
        assert torch.equal(latents[16:], condition)
        x = x - schedule.sigmas[step] * flow.double()
        if step < 3:
            sigma = schedule.sigmas[step + 1]
            x = (1 - sigma) * x + sigma * draws[step + 1]
    assert len(seen) == 4
    torch.testing.assert_close(clean.double(), x, rtol=1e-5, atol=1e-5)


def test_exactly_four_draws():
    """Bitwise: the next chunk begins with the fifth draw."""
    _, _, _, generator = run(ModelRollout(small_transformer()))
    other = torch.Generator().manual_seed(3)
    for _ in range(4):
        torch.randn(1, *SHAPE, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_latents_stay_float32_in_a_low_precision_model():
    clean, _, _, _ = run(ModelRollout(small_transformer(dtype=torch.bfloat16)))
    assert clean.dtype == torch.float32
    assert not torch.equal(clean, clean.bfloat16().float())


def test_commit_writes_the_clean_latents():
    """Bitwise: the same as a full forward at time zero on them."""
    made, expected = (ModelRollout(small_transformer()) for _ in range(2))
    inputs = chunk_inputs(0)
    commit(
        made.model,
        clean=inputs.clean[:16],
        condition=inputs.noisy[16:],
        context=made.context(0),
        step=made.time(0.0),
    )
    latents = torch.cat((inputs.clean[:16], inputs.noisy[16:]))
    expected.probe(0, 0.0, latents)
    for mine, theirs in zip(made.pool.layers, expected.pool.layers, strict=True):
        assert torch.equal(mine.key, theirs.key)
        assert torch.equal(mine.value, theirs.value)


def test_a_draw_is_float32_of_the_chunks_shape():
    generator = torch.Generator().manual_seed(0)
    noise = draw_noise(generator, channels=5, height=4, width=6, device=CPU)
    assert noise.shape == (5, 3, 4, 6)
    assert noise.dtype == torch.float32
