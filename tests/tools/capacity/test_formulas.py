"""Formulas against hand-made sums, published values and the simulation."""

from math import factorial

import pytest

from vllm_omni.diffusion.geometry import chunk_play_ms
from vllm_omni.tools.capacity.plan import (
    mean_wait_s,
    places_for,
    sessions_per_group,
    waiting_share,
)
from vllm_omni.tools.capacity.simulation import Crowd, simulate

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def erlang_c(places: int, load: float) -> float:
    """The textbook's form, with factorials."""
    last = load**places / factorial(places) * places / (places - load)
    return last / (sum(load**n / factorial(n) for n in range(places)) + last)


@pytest.mark.parametrize(("places", "load"), [(1, 0.5), (2, 1.9), (14, 8.0), (60, 51.5)])
def test_the_share_that_waits_is_erlangs(places, load):
    # Two ways to add up the same positive terms: equal but for rounding.
    assert waiting_share(places, load) == pytest.approx(erlang_c(places, load), rel=1e-9)
    assert waiting_share(places, float(places)) == 1.0


@pytest.mark.parametrize(("load", "places"), [(8.0, 14), (32.0, 43), (1e3, 1056), (1e4, 10_175)])
def test_places_for_one_in_twenty_waiting(load, places):
    """Worked out once by another program."""
    assert places_for(load, 0.05) == places
    assert waiting_share(places, load) <= 0.05 < waiting_share(places - 1, load)


def test_worlds_of_a_group_are_a_step_function():
    assert chunk_play_ms(16.0) == 750.0
    assert chunk_play_ms(24.0) == 500.0
    steps = {560.0: 1, 460.0: 1, 376.0: 1, 375.0: 2, 281.0: 2, 250.0: 3, 751.0: 0}
    assert {ms: sessions_per_group(ms, 16.0) for ms in steps} == steps
    assert sessions_per_group(560.0, 24.0) == 0


def test_the_simulation_agrees_where_the_formula_is_exact():
    """One line, exponential stays, endless patience: what Erlang assumed.

    40,000 arrivals that come in bunches: the share is known to about a tenth of itself.
    """
    crowd = Crowd(viewers=8.0, stay_s=600.0, spread=0.0)
    waits = simulate(crowd, pods=1, places=10, arrivals=40_000, seed=1)
    assert waits.waiting == pytest.approx(waiting_share(10, 8.0), rel=0.1)
    assert waits.mean_s == pytest.approx(mean_wait_s(10, 8.0, 600.0), rel=0.2)
    assert waits.in_use == pytest.approx(0.8, rel=0.05)
