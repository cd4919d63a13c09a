"""Writing a chunk into the window and attending to it, against a plain history."""

import pytest
import torch

from tests.helpers.dense_oracle import visible_history
from tests.helpers.kv_window import chronological
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import (
    ar_diffusion_paged_attention,
    write_window,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cache, pytest.mark.cpu]

TOKENS, HEADS, HEAD_DIM = 5, 2, 8
WINDOWS = [(3, 9), (4, 8), (5, 12), (0, 4), (7, 11)]


def session(sink, window, *, page_tokens=4, scattered=False, layers=1):
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=HEADS, text_heads=HEADS, head_dim=HEAD_DIM,
        window_frames=window, sink_frames=sink, text_tokens=4, element_bytes=4,
        page_tokens=page_tokens,
    )  # fmt: skip
    pages = 2 * spec.window_pages(TOKENS) + 3
    pool = KVPool(spec, pages, dtype=torch.float32, device=torch.device("cpu"))
    if scattered:
        singles = [pool.pages.allocate(1) for _ in range(pages)]
        for single in singles[::2]:
            pool.pages.free(single)
    return SessionKV(pool, TOKENS)


def chunk_tensors(chunk, probe=0):
    generator = torch.Generator().manual_seed(100 * chunk + probe)
    return [torch.randn(3 * TOKENS, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]


def attend(kv, chunk, tensors):
    query, *stored = tensors
    pages, plan = kv.pool.layers[0], kv.plan(3 * chunk, 3)
    write_window(*stored, pages, plan)
    return ar_diffusion_paged_attention(
        query,
        pages=pages,
        plan=plan,
        backend=create_attention_backend("reference"),
        scale=HEAD_DIM**-0.5,
    )


class History:
    """Every committed frame, for ever."""

    def __init__(self, sink, window):
        self.sink, self.window = sink, window
        self.frames: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, chunk, query, key, value):
        picked = visible_history(3 * chunk, frames=3, sink=self.sink, window=self.window)
        own = list(zip(key.chunk(3), value.chunk(3), strict=True))
        seen = [self.frames[frame] for frame in picked] + own
        keys, values = (torch.cat(part).double() for part in zip(*seen, strict=True))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * HEAD_DIM**-0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    def commit(self, key, value):
        self.frames += zip(key.chunk(3), value.chunk(3), strict=True)


@pytest.mark.parametrize(("sink", "window"), WINDOWS)
@pytest.mark.parametrize("scattered", [False, True])
def test_ring_equals_a_plain_history(sink, window, scattered):
    """Up to rounding and the order of keys, through several turns of the ring."""
    kv, history = session(sink, window, scattered=scattered), History(sink, window)
    for chunk in range(9):
        for probe in range(1, 3):
            tensors = chunk_tensors(chunk, probe)
            torch.testing.assert_close(
                attend(kv, chunk, tensors).double(), history.attend(chunk, *tensors),
                rtol=1e-5, atol=1e-5,
            )  # fmt: skip
        clean = chunk_tensors(chunk)
        attend(kv, chunk, clean)
        history.commit(*clean[1:])


@pytest.mark.parametrize(("sink", "window"), WINDOWS)
@pytest.mark.parametrize("page_tokens", [1, 3, 5, 16])
def test_scattered_pages_hold_the_same_bits(sink, window, page_tokens):
    """Bitwise, for pages that divide a frame and pages that do not."""
    extent = session(sink, window, page_tokens=page_tokens)
    spread = session(sink, window, page_tokens=page_tokens, scattered=True)
    for chunk in range(7):
        tensors = chunk_tensors(chunk)
        assert torch.equal(attend(extent, chunk, tensors), attend(spread, chunk, tensors))
    for mine, theirs in zip(
        chronological(extent, 0, 21), chronological(spread, 0, 21), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_writing_touches_the_chunks_own_slots_only():
    """Bitwise: other sessions, other layers and other frames keep their values."""
    kv = session(3, 9, layers=2)
    other = SessionKV(kv.pool, 2)
    for chunk in range(4):
        write_window(*chunk_tensors(chunk)[1:], kv.pool.layers[0], kv.plan(3 * chunk, 3))
    before = [layer.key.clone() for layer in kv.pool.layers]
    key, value, _ = chunk_tensors(9)
    write_window(key, value, kv.pool.layers[0], kv.plan(12, 3))
    changed = (before[0] != kv.pool.layers[0].key).flatten(0, 1).any(-1).any(-1)
    assert changed.sum() == 3 * TOKENS
    assert torch.equal(before[1], kv.pool.layers[1].key)
    assert not changed.unflatten(0, (-1, 4))[list(other.allocation.pages)].any()


def test_chronological_copies_are_in_the_order_of_frames():
    kv = session(4, 8)
    for chunk in range(5):
        key = torch.arange(3 * chunk, 3 * chunk + 3).repeat_interleave(TOKENS).float()
        filled = key[:, None, None].expand(-1, HEADS, HEAD_DIM).contiguous()
        write_window(filled, -filled, kv.pool.layers[0], kv.plan(3 * chunk, 3))
    keys, values = chronological(kv, 0, 15)
    frames = keys[::TOKENS, 0, 0].tolist()
    assert frames == [0, 1, 2, 3, 11, 12, 13, 14]
    assert torch.equal(values, -keys)
