"""The plan: formulas against sums by hand, published values and a simulation; the simulation."""

import json
from math import factorial

import pytest

from tests.helpers.server import ROOT
from vllm_omni.diffusion.geometry import chunk_play_ms
from vllm_omni.entrypoints.cli.main import dispatch
from vllm_omni.errors import ConfigError
from vllm_omni.tools.capacity.plan import (
    Demands,
    make_plan,
    mean_wait_s,
    places_for,
    sessions_per_group,
    simulate_plan,
    waiting_share,
)
from vllm_omni.tools.capacity.simulation import Crowd, Policy, simulate

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CROWD = Crowd(viewers=95.0, patience_s=120.0)


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


def waits(policy: Policy, **changes: object):
    return simulate(CROWD, policy=policy, arrivals=4_000, **{"pods": 25, "places": 4} | changes)


def test_least_connections_comes_close_to_one_line_and_blind_policies_do_not():
    """A waiter is stuck on a pod: places elsewhere stay free, and more viewers give up."""
    one_line = waits(Policy.LEAST, pods=1, places=100)
    least, turns, blind = waits(Policy.LEAST), waits(Policy.ROUND_ROBIN), waits(Policy.RANDOM)
    assert one_line.gave_up <= least.gave_up < 0.05
    assert 2 * least.gave_up < turns.gave_up < blind.gave_up
    assert one_line.in_use > least.in_use > turns.in_use > blind.in_use


def test_nobody_waits_beyond_patience_and_the_same_seed_says_the_same():
    crowded = waits(Policy.RANDOM, places=3)
    assert crowded.gave_up > 0.1
    assert crowded.p99_s <= 120.0
    assert crowded == waits(Policy.RANDOM, places=3)
    assert crowded != waits(Policy.RANDOM, places=3, seed=1)


def test_with_room_for_everybody_nobody_waits():
    idle = waits(Policy.LEAST, places=10)
    assert (idle.waiting, idle.gave_up, idle.p99_s, idle.mean_s) == (0.0, 0.0, 0.0, 0.0)


def test_ten_thousand_viewers():
    plan = make_plan(Demands(10_000))
    assert (plan.places, plan.groups, plan.gpus) == (10_175, 10_175, 40_700)
    assert (plan.machines, plan.pods, plan.cells) == (5_088, 5_088, 21)
    # Counted by hand: 10,000 / 0.75 s, 4 Mbit/s each, 0.7 ms and 75 ms of CPU a chunk.
    assert plan.chunks_per_s == pytest.approx(13_333.3, rel=1e-4)
    assert plan.video_gbit_per_s == pytest.approx(40.0)
    assert plan.proxy_cores == pytest.approx(9.33, rel=1e-3)
    assert plan.h264_cores == pytest.approx(1000.0)
    # A tenth of the groups reads 37 GB each within ten minutes.
    assert plan.cold_start_tbyte == pytest.approx(37.6, rel=1e-2)
    assert plan.cold_start_gbyte_per_s == pytest.approx(62.7, rel=1e-2)
    assert plan.chunk_bound_ms == pytest.approx(375.8, rel=1e-3)


def test_the_page_shows_what_the_command_says():
    page = (ROOT / "docs/scaling.md").read_text()
    _, _, after = page.partition("| viewers | places |")
    rows = [line.strip("| ").split(" | ") for line in after.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 5
    for viewers, *shown in rows:
        plan = make_plan(Demands(int(viewers.replace(",", ""))))
        counts = (plan.places, plan.groups, plan.gpus, plan.pods, plan.cells)
        assert shown == [
            *(f"{count:,}" for count in counts),
            *(f"{plan.video_gbit_per_s:g}", f"{plan.proxy_cores:.2f}", f"{plan.h264_cores:.1f}"),
            f"{plan.cold_start_tbyte:.2f}",
        ]


def test_a_chunk_in_half_the_time_halves_the_gpus_and_one_a_little_faster_does_not():
    today, faster, half = (
        make_plan(Demands(1000, chunk_ms=ms)).gpus for ms in (560.0, 460.0, 375.0)
    )
    assert today == faster == 2 * half


def test_the_encoder_bounds_a_pod():
    assert make_plan(Demands(100, ulysses=1, chunk_ms=90.0)).groups_per_pod == 8
    assert make_plan(Demands(100, ulysses=1, chunk_ms=90.0, encoder_cores=2.0)).groups_per_pod == 2


def test_waits_of_a_plan_are_within_its_target():
    demands = Demands(200)
    waits = simulate_plan(demands, make_plan(demands), Policy.LEAST, arrivals=4_000)
    # Pods' places are rounded up and the stays are no exponential ones: twice the target is bad.
    assert waits.waiting < 0.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"viewers": 0}, "--viewers must be above 0, got 0"),
        ({"chunk_ms": float("nan")}, "--chunk-ms must be above 0"),
        ({"fps": 24.0}, "a chunk plays 500 ms at 24 fps, but takes 560 ms"),
        ({"ulysses": 16}, "a group of 16 GPUs does not fit into a machine of 8"),
        ({"waiting_target": 1.5}, "--waiting-target must be below 1"),
        ({"gpu": "abacus"}, "--gpu must be one of h200"),
    ],
)
def test_what_no_plan_can_be_made_with(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Demands(**{"viewers": 8} | wrong)


def test_the_command_prints_a_table_or_json(capsys):
    line = ["plan", "--viewers", "8", "--gpu", "h200", "--ulysses", "4", "--chunk-ms", "560"]
    assert dispatch(line) == 0
    shown = capsys.readouterr().out
    assert "750 ms at 16 fps" in shown
    assert "clients that name no fps play at 24: a chunk then plays 500 ms" in shown
    assert dispatch([*line, "--json", "--simulate"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["places"] == 14
    assert found["plan"]["gpus"] == 56
    assert set(found["simulated"]) == {policy.value for policy in Policy}
    assert dispatch(["plan", "--viewers", "8", "--fps", "24"]) == 1
    assert "no world would be in real time" in capsys.readouterr().err
