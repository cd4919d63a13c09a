"""Several ranks serve sessions as one does: same bytes, same errors, nothing left."""

import numpy as np
import pytest

from tests.helpers.fixtures.carriers import carrier, group_config, group_executor, raylets
from tests.helpers.mark import advanced
from tests.helpers.rollouts import PROMPTS
from tests.helpers.sessions import make_chunks, make_rollout, small_request
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.errors import UnsupportedParallelismError

__all__ = ["carrier", "raylets"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

SESSIONS, LAYERS = 2, 3
WORLDS = {
    "SP2": DiffusionParallelConfig(ulysses_degree=2),
    "TP2xSP2": DiffusionParallelConfig(tensor_parallel_size=2, ulysses_degree=2),
}


@pytest.fixture(scope="module")
def one():
    made = InlineExecutor(tiny_config("inline", max_num_seqs=SESSIONS))
    made.start()
    yield made
    made.shutdown()


@pytest.fixture(scope="module", params=["SP2", advanced("TP2xSP2")])
def group(request, carrier):
    made = group_executor(
        group_config(carrier, parallel=WORLDS[request.param], max_num_seqs=SESSIONS)
    )
    assert made.start().sessions == SESSIONS
    yield made
    made.shutdown()


def assert_same_pixels(made, expected, group):
    """Bitwise under sequence parallelism; partial sums of TP may tip a value over a level."""
    assert len(made) == len(expected)
    tolerance = 1 if group.group.world_size > 2 else 0
    for chunk, single in zip(made, expected, strict=True):
        apart = np.abs(chunk.astype(np.int16) - single.astype(np.int16))
        assert apart.max() <= tolerance
        assert (apart > 0).mean() < 1e-3


@pytest.mark.advanced_model
def test_rolling_window_and_a_moving_prompt(one, group):
    request = small_request(num_chunks=8)
    expected = make_rollout(one, request, prompts=PROMPTS)
    assert_same_pixels(make_rollout(group, request, prompts=PROMPTS), expected, group)


def test_a_prompt_that_moves_is_seen(one):
    request = small_request(num_chunks=5)
    still, moved = make_rollout(one, request), make_rollout(one, request, prompts=PROMPTS)
    assert np.array_equal(still[2], moved[2])
    assert not np.array_equal(still[4], moved[4])


def test_interleaved_sessions_do_not_meet(one, group):
    requests = {"a": small_request(seed=3, num_chunks=4), "b": small_request(seed=4, num_chunks=4)}
    expected = {name: make_rollout(one, request) for name, request in requests.items()}
    made = {name: [] for name in requests}
    for name, request in requests.items():
        group.open_session(name, request)
    for index in range(4):
        for name in requests:
            made[name] += [c.data for c in make_chunks(group, name, range(index, index + 1))]
    for name in requests:
        group.close_session(name)
        assert_same_pixels(made[name], expected[name], group)


@pytest.mark.advanced_model
def test_leaving_early_gives_everything_back(one, group):
    for attempt in range(3):
        for name in ("a", "b"):
            group.open_session(name, small_request(seed=attempt))
            make_chunks(group, name, range(2))
            group.close_session(name)
    request = small_request(num_chunks=2)
    group.open_session("kept", request)
    # The pool holds two sessions, so this one opens only if all pages came back.
    assert_same_pixels(make_rollout(group, request), make_rollout(one, request), group)
    group.close_session("kept")


def test_a_size_that_the_ranks_cannot_share_is_refused_and_the_group_goes_on(one, group):
    with pytest.raises(UnsupportedParallelismError, match="15 tokens per latent frame"):
        group.open_session("odd", small_request(height=48, width=80))
    request = small_request(height=32, width=64, num_chunks=2)
    assert_same_pixels(make_rollout(group, request), make_rollout(one, request), group)


@pytest.mark.parametrize("output", [OutputKind.LATENT, OutputKind.FLOAT])
def test_other_outputs(one, group, output):
    # Bitwise under sequence parallelism, 1e-5 where partial sums are added.
    request = small_request(num_chunks=3, output=output)
    expected = make_rollout(one, request)
    tolerance = 1e-5 if group.group.world_size > 2 else 0.0
    for chunk, single in zip(make_rollout(group, request), expected, strict=True):
        np.testing.assert_allclose(chunk, single, rtol=0, atol=tolerance)


def test_the_executor_reports_the_exchanges_of_its_root(group):
    before = group.traffic()
    make_rollout(group, small_request(num_chunks=2))
    after = group.traffic()
    per_chunk = 4 * (3 * LAYERS + 1) + 3 * LAYERS - 2
    assert after.total.calls - before.total.calls == 2 * per_chunk
    assert after.gather.calls - before.gather.calls == 2 * 4
    assert after.total.sent_bytes > before.total.sent_bytes
    assert after.total.host_ms > before.total.host_ms
