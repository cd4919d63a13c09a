"""Page ids, window arithmetic, budget and session windows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.dense_oracle import visible_history
from tests.helpers.kv_window import resident_frames
from vllm_omni.errors import ConfigError, OutOfKVMemoryError, SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import (
    ExtentPlan,
    KVPool,
    PageAllocation,
    PagePool,
    ScatteredPlan,
    SessionKV,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.window import (
    KVCacheSpec,
    MemoryNeeds,
    WindowLayout,
    plan_pool,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cache, pytest.mark.cpu]

SIZES = st.tuples(st.integers(0, 12), st.integers(3, 12)).map(lambda s: (s[0], s[0] + s[1]))
"""Sink and window: the rolling part holds at least one chunk."""


def spec_of(**changes):
    sizes = {
        "num_layers": 2, "num_kv_heads": 2, "text_heads": 4, "head_dim": 8, "window_frames": 9,
        "sink_frames": 3, "text_tokens": 10, "element_bytes": 4, "page_tokens": 4,
    }  # fmt: skip
    return KVCacheSpec(**{**sizes, **changes})


# --- window arithmetic, against the rule of visibility ------------------------------------------


@given(SIZES, st.integers(0, 40))
def test_visible_slots_hold_the_frames_of_the_rule(sizes, chunk):
    """The ring shows exactly the frames that a dense history would show."""
    sink, window = sizes
    layout, start = WindowLayout(window, sink), 3 * chunk
    holder: dict[int, int] = {}
    for frame in range(start + 3):
        holder[layout.slot(frame)] = frame
    seen = sorted(holder[slot] for slot in range(layout.visible_frames(start, 3)))
    history = visible_history(start, frames=3, sink=sink, window=window)
    assert seen == sorted([*history, *range(start, start + 3)])


@given(SIZES, st.integers(0, 40))
def test_write_runs_cover_the_chunk_once_and_in_order(sizes, chunk):
    sink, window = sizes
    layout, start = WindowLayout(window, sink), 3 * chunk
    runs = layout.write_runs(start, 3)
    written = [(run.first + i, run.place + i) for run in runs for i in range(run.count)]
    assert written == [(i, layout.slot(start + i)) for i in range(3)]
    assert len(runs) <= 3


@given(SIZES, st.integers(0, 60))
def test_resident_frames_are_oldest_first(sizes, committed):
    sink, window = sizes
    layout = WindowLayout(window, sink)
    frame_of = {layout.slot(frame): frame for frame in range(committed)}
    frames = [frame_of[slot] for slot in resident_frames(layout, committed)]
    assert frames == sorted(frames)
    assert len(frames) == min(committed, window)


@pytest.mark.parametrize(("window", "sink"), [(8, 6), (3, 1), (9, 9), (2, 0), (9, -1)])
def test_a_ring_that_cannot_hold_a_chunk_is_refused(window, sink):
    with pytest.raises(ConfigError, match=r"leaves -?\d+ rolling frames; at least 3"):
        WindowLayout(window, sink)


# --- page ids -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 30))
def test_pages_are_never_held_twice(steps, num_pages):
    """Any order of taking and giving back; 0 gives the oldest back, others take as many."""
    pool, held = PagePool(num_pages), []
    for step in steps:
        if step == 0 and held:
            pool.free(held.pop(0))
        elif 0 < step <= pool.num_free:
            held.append(pool.allocate(step))
        elif step > pool.num_free:
            with pytest.raises(OutOfKVMemoryError):
                pool.allocate(step)
        ids = [page for allocation in held for page in allocation.pages]
        assert len(set(ids)) == len(ids) == num_pages - pool.num_free
        assert all(list(a.pages) == sorted(a.pages) for a in held)


def test_an_extent_is_taken_where_one_is_free():
    pool = PagePool(10)
    first, second, third = (pool.allocate(n) for n in (3, 2, 4))
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5).pages == (0, 1, 2, 3, 4)
    pool.free(third)
    assert pool.allocate(4).pages == (5, 6, 7, 8)


def test_scattered_pages_are_the_last_resort():
    pool = PagePool(7)
    singles = [pool.allocate(1) for _ in range(7)]
    for single in singles[::2]:
        pool.free(single)
    allocation = pool.allocate(3)
    assert allocation.pages == (0, 2, 4)
    assert not allocation.is_extent


def test_a_full_pool_says_what_was_needed():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(OutOfKVMemoryError, match=r"needs 2 KV pages, 1 of 4 are free"):
        pool.allocate(2)


def test_freeing_twice_is_an_error():
    pool = PagePool(4)
    allocation = pool.allocate(2)
    pool.free(allocation)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(allocation)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(PageAllocation((3,)))


# --- budget -------------------------------------------------------------------------------------


def test_bytes_of_a_session():
    spec = spec_of()
    assert spec.token_bytes == 2 * 2 * 2 * 8 * 4
    assert spec.window_pages(6) == math.ceil(9 * 6 / 4)
    assert spec.text_bytes == 2 * 2 * 10 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("fraction", "free_sessions", "wanted", "sessions", "raised"),
    [
        (None, 10, 2, 2, False),
        (None, 2.5, 8, 2, False),
        (0.5, 10, 8, 5, False),
        (0.5, 10, 3, 3, False),
        (0.1, 5, 3, 1, True),
    ],
)
def test_pool_holds_the_sessions_that_fit(fraction, free_sessions, wanted, sessions, raised):
    spec, other = spec_of(), 1000
    session_bytes = spec.window_pages(6) * spec.page_bytes + other
    budget = plan_pool(
        MemoryNeeds(session_bytes - other, state=other, workspace=600, activations=400),
        window_pages=spec.window_pages(6),
        max_sessions=wanted,
        free_bytes=1000 + int(free_sessions * session_bytes),
        fraction=fraction,
    )
    assert (budget.sessions, budget.raised) == (sessions, raised)
    assert budget.num_pages == sessions * spec.window_pages(6)


def test_too_little_memory_for_one_session_names_the_numbers():
    needs = MemoryNeeds(2 << 30, state=0, workspace=0, activations=0)
    with pytest.raises(OutOfKVMemoryError, match=r"world needs 2.0 GiB .*, 1.9 GiB are free"):
        plan_pool(needs, window_pages=1, max_sessions=1, free_bytes=1900 << 20, fraction=None)


# --- session windows ----------------------------------------------------------------------------


def kv_pool(num_pages, **changes):
    return KVPool(spec_of(**changes), num_pages, dtype=torch.float32, device=torch.device("cpu"))


def test_plans_of_an_extent_read_a_prefix():
    pool = kv_pool(40)
    pool.pages.allocate(5)
    kv = SessionKV(pool, 6)
    for chunk in range(6):
        plan = kv.plan(3 * chunk, 3)
        assert isinstance(plan, ExtentPlan)
        assert plan.first_pool_token == 5 * 4
        assert plan.visible_tokens == 6 * min(3 * chunk + 3, 9)
        assert sum(run.count for run in plan.write_runs) == 18


def test_scattered_plan_writes_where_the_extent_would():
    """The index of a scattered plan names, page by page, the tokens of the extent's runs."""
    extent, pool = SessionKV(kv_pool(14), 6), kv_pool(40)
    singles = [pool.pages.allocate(1) for _ in range(40)]
    for single in singles[::2]:
        pool.pages.free(single)
    scattered = SessionKV(pool, 6)
    table = torch.tensor(scattered.allocation.pages)
    for chunk in range(6):
        plain, spread = extent.plan(3 * chunk, 3), scattered.plan(3 * chunk, 3)
        assert isinstance(plain, ExtentPlan)
        assert isinstance(spread, ScatteredPlan)
        tokens = torch.cat([
            torch.arange(run.place, run.place + run.count)
            for run in plain.write_runs
        ])  # fmt: skip
        assert torch.equal(spread.write_index, table[tokens // 4] * 4 + tokens % 4)
        assert spread.visible_tokens == plain.visible_tokens


def test_closing_gives_pages_back_once():
    pool = kv_pool(20)
    kv = SessionKV(pool, 6)
    assert pool.pages.num_free == 20 - 14
    kv.close()
    kv.close()
    assert pool.pages.num_free == 20
    with pytest.raises(SessionClosedError):
        kv.plan(0, 3)


def test_sessions_of_several_sizes_share_a_pool():
    pool = kv_pool(60)
    sizes = (6, 1, 7, 3)
    sessions = [SessionKV(pool, size) for size in sizes]
    assert pool.pages.num_free == 60 - sum(math.ceil(9 * size / 4) for size in sizes)
    for session in sessions:
        session.close()
    assert pool.pages.num_free == 60
