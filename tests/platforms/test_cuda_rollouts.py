"""The tiny checkpoint on GPUs against the same on the CPU; without a GPU most is skipped."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.mark import hardware_test
from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion]

SIZE, OTHER = "64x96", "32x48"
FLOAT32_ROUNDING = 2.0**-16
"""Of float32 beside bfloat16, which keeps 16 bits less."""


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    """Latents by size of a rollout with these settings; each is made once."""
    folder, made = tmp_path_factory.mktemp("rollouts"), {}

    def roll(*sizes, **settings):
        key = json.dumps([settings, sizes], sort_keys=True)
        if key not in made:
            target = folder / f"{len(made)}.npz"
            done = subprocess.run(
                [sys.executable, "-m", "tests.helpers.device_rollouts",
                 str(tiny_checkpoint_dir()), str(target), json.dumps(settings), *(sizes or [SIZE])],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            made[key] = [*np.load(target).values()]
        return made[key]

    return roll


def apart(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@pytest.fixture
def rounding(rolled):
    """How far bfloat16 takes a rollout from float32, on the CPU."""
    exact, rounded = (rolled(device="cpu", dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    return apart(rounded, exact)


@pytest.mark.cpu
@pytest.mark.advanced_model
def test_a_rollout_beside_another_size_is_the_rollout_alone(rolled):
    """Bitwise; it also shows on the CPU that the program of the tests below runs."""
    together = rolled(SIZE, OTHER, device="cpu", dtype="float32")
    assert np.array_equal(together[0], rolled(device="cpu", dtype="float32")[0])
    assert np.isfinite(together[1]).all()


@hardware_test({"cuda": "H100"})
@pytest.mark.parametrize("eager", [True, False])
def test_float32_on_a_gpu_is_reordered(rolled, rounding, eager):
    """Tolerance: eight times what float32 rounds where bfloat16 rounds as measured."""
    ours = rolled(device="cuda", dtype="float32", enforce_eager=eager)[0]
    assert apart(ours, rolled(device="cpu", dtype="float32")[0]) <= 8 * FLOAT32_ROUNDING * rounding


@hardware_test({"cuda": "H100"})
@pytest.mark.parametrize("eager", [True, False])
def test_bfloat16_on_a_gpu_is_as_near_to_float32_as_on_the_cpu(rolled, rounding, eager):
    ours = rolled(device="cuda", dtype="bfloat16", enforce_eager=eager)[0]
    assert apart(ours, rolled(device="cpu", dtype="float32")[0]) <= 2 * rounding


@hardware_test({"cuda": "H100"})
def test_a_second_size_on_a_compiled_server_is_the_same_beside_any_other(rolled):
    """Bitwise: its blocks run eagerly, beside the size that is compiled."""
    settings = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False}
    together = rolled(SIZE, OTHER, **settings)
    assert np.array_equal(together[0], rolled(**settings)[0])
    assert np.array_equal(together[1], rolled("32x32", OTHER, **settings)[1])


@hardware_test({"cuda": "H100"})
def test_leased_graphs_replay_the_eager_rollout(rolled):
    """Bitwise."""
    settings = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": True}
    leased = rolled(leased_post_attention=True, **settings)[0]
    assert np.array_equal(leased, rolled(**settings)[0])


@hardware_test({"cuda": "H100"}, num_cards=2)
def test_two_gpus_share_a_world(rolled, rounding):
    """Reordered: products of half the rows may be other kernels; tolerance as on one GPU."""
    shared = rolled(device="cuda", dtype="float32", enforce_eager=True, ulysses_degree=2)[0]
    alone = rolled(device="cpu", dtype="float32")[0]
    assert apart(shared, alone) <= 8 * FLOAT32_ROUNDING * rounding
