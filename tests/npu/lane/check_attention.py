"""The attention backend on the Python device: layouts, lengths, arguments, copies, equalities."""

import pytest
import torch

from tests.npu import python_device
from tests.npu.lane.device import device, operator_calls, platform
from vllm_omni.diffusion.attention.backends import npu_fusion
from vllm_omni.diffusion.attention.backends.npu_fusion import cumulative_ends
from vllm_omni.diffusion.attention.backends.reference import ReferenceAttention
from vllm_omni.diffusion.attention.registry import create_attention_backend
from vllm_omni.diffusion.attention.self_check import check_attention
from vllm_omni.errors import ConfigError
from vllm_omni.experimental.ar_diffusion.kv_cache.budget import KVCacheSpec
from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import (
    ar_diffusion_paged_attention,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool, SessionKV

__all__ = ["device", "platform"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

TOKENS_PER_FRAME, HEADS, HEAD_DIM = 10, 2, 16
SPEC = KVCacheSpec(
    num_layers=1, num_kv_heads=HEADS, text_heads=HEADS, head_dim=HEAD_DIM, window_frames=6,
    sink_frames=2, text_tokens=8, element_bytes=2, page_tokens=16,
)  # fmt: skip
PAGES = SPEC.window_pages(TOKENS_PER_FRAME)


@pytest.fixture
def backend(platform):
    return create_attention_backend(platform.attention_backend)


def roll(device, backend, *, fragmented: bool, chunks: int = 5):
    """Outputs of some chunks of random queries, keys and values, on the host."""
    pool = KVPool(SPEC, 2 * PAGES + 1, dtype=torch.bfloat16, device=device)
    if fragmented:  # every other page is taken, so no extent is left
        singles = [pool.pages.allocate(1) for _ in range(2 * PAGES + 1)]
        for single in singles[::2]:
            pool.pages.free(single)
    session = SessionKV(pool, TOKENS_PER_FRAME)
    assert session.allocation.is_extent is not fragmented
    draw = torch.Generator().manual_seed(3)
    outputs = []
    for chunk in range(chunks):
        query, key, value = (
            torch.randn(3 * TOKENS_PER_FRAME, HEADS, HEAD_DIM, generator=draw).bfloat16().to(device)
            for _ in range(3)
        )
        plan = session.plan(3 * chunk, 3)
        before = python_device.transfers.copy()
        output = ar_diffusion_paged_attention(
            query, key, value, pages=pool.layers[0], plan=plan, backend=backend, scale=0.25
        )
        assert python_device.transfers == before, "a layer moves nothing and reads nothing back"
        outputs.append(output.cpu())
    return pool, outputs


def test_an_extent_is_read_in_place_without_lengths_or_masks(device, backend):
    pool, _ = roll(device, backend, fragmented=False)
    calls = operator_calls("npu_fusion_attention")
    assert len(calls) == 5
    for call in calls:
        given = call.arguments
        assert given["input_layout"] == "BSND"
        assert (given["head_num"], given["scale"]) == (HEADS, 0.25)
        assert given["actual_seq_qlen"] is given["actual_seq_kvlen"] is given["atten_mask"] is None
        for name, pages in (("key", pool.layers[0].key), ("value", pool.layers[0].value)):
            assert given[name].data_ptr() == pages.data_ptr()
            assert given[name].is_contiguous()
            assert given[name].device.type == "npu"
    visible = [call.arguments["key"].shape[1] for call in calls]
    assert visible == [30, 60, 60, 60, 60]


def test_scattered_pages_are_gathered_whole_and_packed_with_ends(device, backend):
    roll(device, backend, fragmented=True)
    calls = operator_calls("npu_fusion_attention")
    assert [call.arguments["input_layout"] for call in calls] == ["TND"] * 5
    assert [call.arguments["actual_seq_qlen"] for call in calls] == [[30]] * 5
    ends = [call.arguments["actual_seq_kvlen"] for call in calls]
    assert ends == [[30], [60], [60], [60], [60]]
    assert all(type(end) is int for (end,) in ends)


def test_scattered_pages_give_the_bytes_of_an_extent(device, backend):
    """Bitwise: only where keys stand in memory differs."""
    _, extent = roll(device, backend, fragmented=False)
    _, scattered = roll(device, backend, fragmented=True)
    assert all(torch.equal(a, b) for a, b in zip(extent, scattered, strict=True))


def test_it_gives_the_bytes_of_the_cpu_attention_it_runs_here(device, backend):
    """Bitwise: the operator's body is the CPU's fused attention."""
    _, here = roll(device, backend, fragmented=False)
    _, there = roll(torch.device("cpu"), create_attention_backend("sdpa"), fragmented=False)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_whole_pages_are_gathered_with_one_index_select_each_for_keys_and_values(
    device, backend, monkeypatch
):
    selected = []
    original = torch.Tensor.index_select

    def counting(tensor, dim, index):
        selected.append((tuple(tensor.shape[1:]), dim, len(index)))
        return original(tensor, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", counting)
    roll(device, backend, fragmented=True, chunks=1)
    needed = -(-3 * TOKENS_PER_FRAME // SPEC.page_tokens)
    assert selected == [((SPEC.page_tokens, HEADS, HEAD_DIM), 0, needed)] * 2


def test_packed_sequences_need_ends_and_lengths_are_refused(device):
    """Exact up to rounding of bfloat16 weights: 4 eps of the largest value."""
    lengths, heads = [2, 3, 2], 2
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, heads, 16, generator=draw).bfloat16() for _ in range(3))

    def packed(ends):
        operator = npu_fusion.load_torch_npu().npu_fusion_attention
        tensors = [x.to(device) for x in (query, key, value)]
        return operator(
            *tensors, heads, "TND", scale=0.25, actual_seq_qlen=ends, actual_seq_kvlen=ends
        )[0].cpu()

    ends = cumulative_ends(lengths)
    assert ends == [2, 5, 7]
    wanted = torch.cat([
        ReferenceAttention().attend(*(x[a:b].float() for x in (query, key, value)), scale=0.25)
        for a, b in zip([0, *ends], ends, strict=False)
    ])  # fmt: skip
    allowed = 4 * torch.finfo(torch.bfloat16).eps * value.abs().max()
    assert (packed(ends).float() - wanted).abs().max() <= allowed
    with pytest.raises(RuntimeError, match=r"ends \[2, 3, 2\] must rise"):
        packed(lengths)


def test_a_wrong_argument_name_is_refused_by_the_vendors_schema(device):
    x = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16, device=device)
    operator = npu_fusion.load_torch_npu().npu_fusion_attention
    with pytest.raises(RuntimeError, match="scale_value"):
        operator(x, x, x, 2, "BSND", scale_value=0.5)


def test_float32_is_refused_with_the_setting_to_change(device, backend):
    x = torch.zeros(3, 2, 16, device=device)
    with pytest.raises(ConfigError, match="dtype: bfloat16"):
        backend.attend(x, x, x, scale=0.25)


def test_the_self_check_runs_both_entries_and_passes(device, backend):
    check_attention(backend, head_dim=128, dtype=torch.bfloat16, device=device)
    layouts = [c.arguments["input_layout"] for c in operator_calls("npu_fusion_attention")]
    assert layouts == ["BSND", "TND"]
