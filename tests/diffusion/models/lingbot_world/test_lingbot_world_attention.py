"""Self- and cross-attention layers in isolation."""

import pytest
import torch

from tests.helpers.kv_window import chronological
from tests.helpers.model_builders import (
    SMALL_MODEL,
    TEXT_TOKENS,
    ModelRollout,
    small_transformer,
    transformer_parts,
)
from vllm_omni.diffusion.attention.backend import create_attention_backend

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def rollout():
    return ModelRollout(small_transformer())


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SMALL_MODEL.dim, generator=generator)


def layer_window(rollout, *, layer, chunk):
    return list(rollout.context(chunk).layers())[layer].window


def test_scale_is_by_head_size():
    assert transformer_parts(SMALL_MODEL).scale == 16**-0.5


def test_stored_keys_are_normed_and_turned_and_values_are_not(rollout):
    """Up to rounding: what stands in the pages of a chunk, recomputed from the projections."""
    layer, x = rollout.model.blocks[1].self_attn, tokens(18)
    window = layer_window(rollout, layer=1, chunk=2)
    layer.write_only(x, window)
    keys, values = chronological(rollout.kv, 1, 9)
    q, k, v = layer.qkv(x).double().chunk(3, dim=-1)
    k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm_k.weight.double()
    pairs = torch.view_as_complex(k.reshape(18, 2, 8, 2))
    turn = torch.complex(window.rotary.cos, window.rotary.sin)[:, None]
    expected = torch.view_as_real(pairs * turn).flatten(-2)
    torch.testing.assert_close(keys[-18:].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values[-18:].double(), v.reshape(18, 2, 16), rtol=0, atol=1e-6)
    assert q.shape == k.shape


def test_write_only_stores_what_attending_stores(rollout):
    """Bitwise."""
    layer, x = rollout.model.blocks[0].self_attn, tokens(18)
    window = layer_window(rollout, layer=0, chunk=1)
    layer(x, window)
    attended = [part.clone() for part in chronological(rollout.kv, 0, 6)]
    layer(tokens(18, seed=5), window)
    layer.write_only(x, window)
    for before, after in zip(attended, chronological(rollout.kv, 0, 6), strict=True):
        assert torch.equal(before, after)


def test_tokens_of_a_chunk_see_each_other_both_ways(rollout):
    """A change in the last frame reaches the first, and the other way round."""
    layer, x = rollout.model.blocks[0].self_attn, tokens(18)
    window = layer_window(rollout, layer=0, chunk=0)
    plain = layer(x, window)
    for changed in (0, 17):
        other = x.clone()
        other[changed] += 1
        moved = (layer(other, window) - plain).abs().amax(-1)
        assert (moved > 0).all()


def test_every_row_of_the_prompt_counts(rollout):
    """No mask: also a last, zero row moves the result."""
    layer = rollout.model.blocks[0].cross_attn
    text, x = tokens(TEXT_TOKENS, seed=2), tokens(18)
    padded = torch.cat((text, torch.zeros(1, SMALL_MODEL.dim)))
    short, long = (layer(x, layer.text_kv(rows)) for rows in (text, padded))
    assert (short - long).abs().max() > 1e-3


def test_tokens_do_not_mix_in_cross_attention(rollout):
    """Up to the kernel for another number of rows: each token asks the prompt alone."""
    layer, x = rollout.model.blocks[0].cross_attn, tokens(18)
    text = layer.text_kv(tokens(TEXT_TOKENS, seed=2))
    torch.testing.assert_close(layer(x, text)[4:7], layer(x[4:7], text), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_backend_is_the_one_that_was_chosen(name):
    backend = create_attention_backend(name)
    model = small_transformer(backend=backend)
    assert backend.name == name
    assert all(block.self_attn.parts.backend is backend for block in model.blocks)
    assert all(block.cross_attn.parts.backend is backend for block in model.blocks)
