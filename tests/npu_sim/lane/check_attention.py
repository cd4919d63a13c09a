"""The attention backend on the simulated device: equalities, lengths, refusals, nothing moved."""

import pytest
import torch

from tests.npu_sim import kernels, operators, simulation
from tests.npu_sim.device import device, operator_calls, order, platform
from vllm_omni.diffusion.attention import npu_fusion
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.attention.reference import ReferenceAttention, check_attention
from vllm_omni.errors import ConfigError
from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import (
    ar_diffusion_paged_attention,
    write_window,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec

__all__ = ["device", "order", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

TOKENS_PER_FRAME, HEADS, HEAD_DIM, CHUNKS = 10, 2, 16, 5
SPEC = KVCacheSpec(
    num_layers=1, num_kv_heads=HEADS, text_heads=HEADS, head_dim=HEAD_DIM, window_frames=6,
    sink_frames=2, text_tokens=8, element_bytes=2, page_tokens=16,
)  # fmt: skip
PAGES = SPEC.window_pages(TOKENS_PER_FRAME)


@pytest.fixture
def backend(platform):
    return create_attention_backend(platform.attention_backend)


def session_on(device, *, fragmented: bool):
    pool = KVPool(SPEC, 2 * PAGES + 1, dtype=torch.bfloat16, device=device)
    if fragmented:  # every other page is taken, so no extent is left
        singles = [pool.pages.allocate(1) for _ in range(2 * PAGES + 1)]
        for single in singles[::2]:
            pool.pages.free(single)
    session = SessionKV(pool, TOKENS_PER_FRAME)
    assert session.allocation.is_extent is not fragmented
    return pool, session


def roll(device, backend, *, fragmented: bool):
    """Outputs of some chunks of random queries, keys and values, on the host."""
    pool, session = session_on(device, fragmented=fragmented)
    draw = torch.Generator().manual_seed(3)
    outputs = []
    for chunk in range(CHUNKS):
        parts = torch.randn(3, 3 * TOKENS_PER_FRAME, HEADS, HEAD_DIM, generator=draw).bfloat16()
        query, key, value = parts.to(device)
        plan = session.plan(3 * chunk, 3)
        torch.npu.synchronize()
        kernels.transfers.clear()
        before = simulation.runtime().counts()
        write_window(key, value, pool.layers[0], plan)
        output = ar_diffusion_paged_attention(
            query, pages=pool.layers[0], plan=plan, backend=backend, scale=0.25
        )
        spent = simulation.runtime().counts() - before
        assert kernels.transfers == {}, "a layer moves nothing and reads nothing back"
        assert not {"stream_syncs", "event_syncs", "device_syncs"} & spent.keys()
        outputs.append(output.cpu())
    return outputs


def test_an_extent_is_read_in_place_without_lengths_or_masks(device, backend):
    pool, session = session_on(device, fragmented=False)
    query, key, value = (
        torch.randn(3 * TOKENS_PER_FRAME, HEADS, HEAD_DIM).bfloat16().to(device) for _ in range(3)
    )
    kernels.calls.clear()
    for chunk in range(CHUNKS):
        plan = session.plan(3 * chunk, 3)
        write_window(key, value, pool.layers[0], plan)
        ar_diffusion_paged_attention(
            query, pages=pool.layers[0], plan=plan, backend=backend, scale=0.25
        )
    made = [call.arguments for call in operator_calls("npu_fusion_attention")]
    assert [given["key"].size[1] for given in made] == [30, 60, 60, 60, 60]
    for given in made:
        assert (given["input_layout"], given["head_num"], given["scale"]) == ("BSND", HEADS, 0.25)
        assert given["actual_seq_qlen"] is given["actual_seq_kvlen"] is given["atten_mask"] is None
        for name, pages in (("key", pool.layers[0].key), ("value", pool.layers[0].value)):
            assert given[name].address == pages.data_ptr()


def test_scattered_pages_give_the_bytes_of_an_extent(device, backend):
    """Bitwise: only where keys stand in memory differs."""
    extent = roll(device, backend, fragmented=False)
    assert {call.arguments["input_layout"] for call in operator_calls("npu_fusion_attention")} == {
        "BSND"
    }
    kernels.calls.clear()
    scattered = roll(device, backend, fragmented=True)
    packed = operator_calls("npu_fusion_attention")
    assert [call.arguments["input_layout"] for call in packed] == ["TND"] * CHUNKS
    assert [call.arguments["actual_seq_kvlen"] for call in packed] == [[30], *[[60]] * 4]
    assert all(torch.equal(a, b) for a, b in zip(extent, scattered, strict=True))


def test_it_gives_the_bytes_of_the_cpu_attention_behind_the_operator(device, backend):
    """Bitwise: the operator's body is the CPU's fused attention."""
    here = roll(device, backend, fragmented=False)
    there = roll(torch.device("cpu"), create_attention_backend("sdpa"), fragmented=False)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_it_agrees_with_attention_written_out(device, backend):
    """Up to rounding to bfloat16, of values of standard deviation one."""
    here = roll(device, backend, fragmented=True)
    there = roll(torch.device("cpu"), ReferenceAttention(), fragmented=False)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_several_packed_sequences_need_ends_and_refuse_lengths(device, backend):
    """Two sequences of 2 and 3 queries over 4 and 3 keys."""
    import torch_npu

    del backend
    draw = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(tokens, HEADS, HEAD_DIM, generator=draw).bfloat16() for tokens in (5, 7, 7)
    )
    placed = [x.to(device) for x in (query, key, value)]

    def packed(queries, keys):
        return torch_npu.npu_fusion_attention(
            *placed, HEADS, "TND", scale=0.25, actual_seq_qlen=queries, actual_seq_kvlen=keys
        )[0].cpu()

    ends = packed(npu_fusion.cumulative_ends([2, 3]), npu_fusion.cumulative_ends([4, 3]))
    alone = create_attention_backend("sdpa")
    parts = [
        alone.attend(query[:2], key[:4], value[:4], scale=0.25),
        alone.attend(query[2:], key[4:], value[4:], scale=0.25),
    ]
    assert torch.equal(ends, torch.cat(parts))
    with pytest.raises(RuntimeError, match="must rise to the 5 tokens"):
        packed([2, 3], [4, 3])


@pytest.fixture
def wrong_operator(monkeypatch):
    """The operator with another scale than it is given."""
    right = operators.BODIES["npu_fusion_attention"]

    def unscaled(*args, **kwargs):
        return right(*args, **kwargs | {"scale": 1.0})

    monkeypatch.setitem(operators.BODIES, "npu_fusion_attention", unscaled)


def test_the_check_at_the_start_passes_what_is_right(device, backend):
    check_attention(backend, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=device)
    layouts = [call.arguments["input_layout"] for call in operator_calls("npu_fusion_attention")]
    assert sorted(layouts) == ["BSND", "BSND", "TND", "TND"]  # Within one tile, and beyond.


@pytest.mark.usefixtures("wrong_operator")
def test_the_check_at_the_start_refuses_what_is_wrong(device, backend):
    with pytest.raises(ConfigError, match="attention backend npu_fusion is wrong on npu:0"):
        check_attention(backend, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=device)


def test_float32_is_refused_by_the_setting_that_avoids_it(device, backend):
    x = torch.zeros(4, HEADS, HEAD_DIM, device=device)
    with pytest.raises(ConfigError, match="dtype: bfloat16"):
        backend.attend(x, x, x, scale=0.25)
