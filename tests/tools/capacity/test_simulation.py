"""What the simulation says of policies and of impatient viewers."""

import pytest

from vllm_omni.tools.capacity.simulation import Crowd, Policy, simulate

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CROWD = Crowd(viewers=95.0, patience_s=120.0)


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
