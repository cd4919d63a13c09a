"""The distilled schedule against the formula in exact fractions."""

from fractions import Fraction

import pytest

from vllm_omni.diffusion.models.lingbot_world.chunk import (
    COMMIT_TIMESTEP,
    DMD_LABELS,
    DmdSchedule,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 5.0, 8.0, 12.0])
def test_levels_are_the_shifted_labels(shift):
    """To the last bit but one of a double."""
    schedule = DmdSchedule.with_shift(shift)
    for label, sigma, timestep in zip(DMD_LABELS, schedule.sigmas, schedule.timesteps, strict=True):
        base = Fraction(label, 1000)
        exact = Fraction(shift) * base / (1 - base + Fraction(shift) * base)
        assert sigma == pytest.approx(float(exact), rel=4e-16)
        assert timestep == pytest.approx(float(1000 * exact), rel=4e-16)


def test_shift_one_gives_the_labels_back():
    assert DmdSchedule.with_shift(1.0).timesteps == DMD_LABELS


def test_noise_falls_from_one_and_never_reaches_zero():
    sigmas = DmdSchedule.with_shift(5.0).sigmas
    assert sigmas[0] == 1.0
    assert list(sigmas) == sorted(sigmas, reverse=True)
    assert min(sigmas) > 0
    assert COMMIT_TIMESTEP == 0.0  # only the commit sees clean latents
