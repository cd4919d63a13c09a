"""Attention backends against a float64 softmax, and extents against pages."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from vllm_omni.diffusion.attention.backend import create_attention_backend, gather_pages
from vllm_omni.diffusion.attention.sdpa import FlashAttention, fused_kernels
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

BACKENDS = ("reference", "sdpa", "flash")
CASES = [(1, 1, 1, 2), (6, 18, 2, 16), (72, 216, 4, 16), (5, 33, 3, 20)]
"""Queries, keys, heads, channels of a head."""


def tensors(queries, keys, heads, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries + keys)
    sizes = (queries, keys, keys)
    return [torch.randn(n, heads, head_dim, generator=generator).to(dtype) for n in sizes]


def dense(query, key, value, scale):
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sizes", CASES)
def test_attention_is_an_unmasked_softmax(name, sizes):
    """Up to rounding: float32 against float64."""
    query, key, value = tensors(*sizes)
    out = create_attention_backend(name).attend(query, key, value, scale=0.25)
    torch.testing.assert_close(out.double(), dense(query, key, value, 0.25), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_order_of_keys_does_not_count(name):
    """Up to the order of the sums; this is what lets a ring stand in for a history."""
    query, key, value = tensors(6, 24, 2, 16)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    backend = create_attention_backend(name)
    torch.testing.assert_close(
        backend.attend(query, key[order], value[order], scale=0.25),
        backend.attend(query, key, value, scale=0.25),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("visible", [1, 4, 7, 12])
def test_pages_equal_an_extent(name, visible):
    """Bitwise: pages are copied together, whatever their order in the pool."""
    query, key, value = tensors(3, 12, 2, 16)
    table, page_tokens = torch.tensor([5, 0, 3]), 4
    key_pages, value_pages = (torch.full((7, page_tokens, 2, 16), 1e9) for _ in range(2))
    key_pages[table], value_pages[table] = (
        part.unflatten(0, (3, page_tokens)) for part in (key, value)
    )
    backend = create_attention_backend(name)
    paged = backend.attend_pages(
        query, key_pages, value_pages, block_table=table, visible_tokens=visible, scale=0.25
    )
    assert torch.equal(paged, backend.attend(query, key[:visible], value[:visible], scale=0.25))


@pytest.mark.parametrize("name", BACKENDS)
def test_low_precision_keeps_its_dtype(name):
    """Lossy: bfloat16 inputs, compared with the softmax of the rounded inputs."""
    query, key, value = tensors(6, 24, 2, 16, torch.bfloat16)
    out = create_attention_backend(name).attend(query, key, value, scale=0.25)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dense(query, key, value, 0.25), rtol=0.02, atol=0.02)


def test_gather_cuts_the_last_page():
    pages = torch.arange(5 * 3).reshape(5, 3, 1, 1).float()
    made = gather_pages(pages, torch.tensor([4, 1]), 4)
    assert made.flatten().tolist() == [12, 13, 14, 3]


def test_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match=r"sdpa.*reference, got 'fastest'"):
        create_attention_backend("fastest")


@pytest.mark.parametrize(
    ("cudnn", "first"),
    [(92000, "CUDNN"), (91501, "CUDNN"), (91500, "FLASH"), (91002, "FLASH"), (None, "FLASH")],
)
def test_cudnn_comes_first_only_where_it_is_sound(cudnn, first):
    """Up to 9.15.0 its kernel is wrong at lengths that are no multiple of 128."""
    kernels = fused_kernels(cudnn)
    assert kernels[0].name == f"{first}_ATTENTION"
    assert (SDPBackend.CUDNN_ATTENTION in kernels) == (first == "CUDNN")
    assert SDPBackend.MATH not in kernels


def test_an_unsound_cudnn_is_warned_of_and_not_taken(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="vllm_omni")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    backend = FlashAttention()
    backend.attend(*tensors(*CASES[1]), scale=0.25)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cuDNN 91002 is below 91501" in caplog.text


def test_flash_names_the_kernel_that_torch_takes():
    query, key, value = tensors(6, 18, 2, 16)
    assert FlashAttention().kernel(query, key, value, scale=0.25) == "flash_attention"
    assert create_attention_backend("sdpa").kernel(query, key, value, scale=0.25) == "sdpa"


def test_flash3_is_activated_in_torch(monkeypatch):
    activated = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    backend = create_attention_backend("flash3")
    assert activated == ["FA3"]
    kernel = backend.kernel(*tensors(6, 18, 2, 16), scale=0.25)
    assert kernel == "flash_attention (FlashAttention-3)"


def test_flash3_that_torch_has_no_entry_for_is_refused_with_what_to_do(monkeypatch):
    def refuse(name):
        raise ValueError(f"unknown implementation {name}")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", refuse)
    with pytest.raises(ConfigError, match=r"ValueError: unknown implementation FA3.* choose flash"):
        create_attention_backend("flash3")


def test_flash3_without_its_package_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"needs the package flash_attn_3 .* or choose flash"):
        create_attention_backend("flash3")
