"""Linear layers: products, fused projections, and which part of the checkpoint a rank reads."""

import pytest
import torch
from torch.nn import functional as F

from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.layers.linear import (
    NATIVE,
    ColumnParallelLinear,
    GeluLinearMethod,
    PlainLinearMethod,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_omni.diffusion.layers.weights import weight_targets

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

DTYPE, METHOD = torch.float32, PlainLinearMethod()


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def ranks(size):
    """Places in a group whose collectives are not used."""
    return [RankGroup(rank=rank, size=size, group=None) for rank in range(size)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(layer, tensors):
    """Store the checkpoint tensors of a layer, as the loader does."""
    targets = weight_targets(layer)
    assert set(targets) == set(tensors)
    for name, target in targets.items():
        assert target.shape == tuple(tensors[name].shape)
        target.store(tensors[name][target.local_slices()])
    return layer


def test_replicated_and_single_rank_layers_multiply():
    """Bitwise: one rank is plain torch."""
    tensors, x = {"weight": draw(6, 4), "bias": draw(6, seed=1)}, draw(3, 4, seed=2)
    expected = F.linear(x, tensors["weight"], tensors["bias"])
    for kind in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = fill(kind(4, 6, DTYPE, METHOD), tensors)
        NATIVE.process(layer)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_columns_of_all_ranks_make_the_whole(size):
    """Up to the kernel that a narrower product takes."""
    tensors, x = {"weight": draw(6, 4), "bias": draw(6, seed=1)}, draw(3, 4, seed=2)
    parts = [
        fill(ColumnParallelLinear(4, 6, DTYPE, METHOD, group=group), tensors)(x)
        for group in ranks(size)
    ]
    whole = F.linear(x, tensors["weight"], tensors["bias"])
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_all_ranks_sum_to_the_whole(size):
    """Up to the order of the sum; the bias is added once, after it."""
    tensors, x = {"weight": draw(6, 8), "bias": draw(6, seed=1)}, draw(3, 8, seed=2)
    layers = [
        fill(RowParallelLinear(8, 6, DTYPE, METHOD, group=group), tensors) for group in ranks(size)
    ]
    shares = [
        layer.method.apply(layer, part, None)
        for layer, part in zip(layers, x.chunk(size, dim=-1), strict=True)
    ]
    made = sum(shares) + layers[0].bias
    whole = F.linear(x, tensors["weight"], tensors["bias"])
    torch.testing.assert_close(made, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_fused_projections_are_the_three_of_the_checkpoint(size):
    tensors = {f"{p}.weight": draw(8, 8, seed=i) for i, p in enumerate("qkv")}
    tensors |= {f"{p}.bias": draw(8, seed=10 + i) for i, p in enumerate("qkv")}
    x = draw(5, 8, seed=20)
    made: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for group in ranks(size):
        layer = QKVParallelLinear(8, DTYPE, METHOD, group=group)
        # Its tensors stand beside it in the checkpoint: self_attn.q, not self_attn.qkv.q.
        targets = dict(layer.weight_targets("self_attn.qkv."))
        assert set(targets) == {f"self_attn.{name}" for name in tensors}
        for name, target in targets.items():
            target.store(tensors[name.removeprefix("self_attn.")][target.local_slices()])
        for part, out in zip("qkv", layer(x).chunk(3, dim=-1), strict=True):
            made[part].append(out)
        key_value, rest = layer.forward_kv(x)
        apart = torch.cat((layer.forward_q(rest), key_value), dim=-1)
        # Fewer columns may take another kernel.
        torch.testing.assert_close(apart, layer(x), rtol=1e-6, atol=1e-6)
    for part, outs in made.items():
        expected = F.linear(x, tensors[f"{part}.weight"], tensors[f"{part}.bias"])
        torch.testing.assert_close(torch.cat(outs, dim=-1), expected, rtol=1e-6, atol=1e-6)


def test_every_row_of_a_sharded_layer_is_read_by_one_rank():
    for kind, axis in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        read = torch.zeros(6, 12)
        for group in ranks(3):
            target = weight_targets(kind(12, 6, DTYPE, METHOD, group=group))["weight"]
            read[target.local_slices()] += 1
            assert target.shard.axis == axis
        assert torch.equal(read, torch.ones(6, 12))


def test_a_product_with_gelu_in_it_is_the_product_and_gelu_behind_it():
    """Reordered. A processor has the exact GELU there, a GPU that by the hyperbolic tangent."""
    layer = ColumnParallelLinear(8, 12, DTYPE, GeluLinearMethod())
    x, weight, bias = draw(5, 8, seed=1), draw(12, 8, seed=2), draw(12, seed=3)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    expected = F.gelu(F.linear(x, weight, bias))
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_only_nvidia_gpus_have_such_a_product():
    assert GeluLinearMethod.where_it_is(torch.device("cpu")) is None
    assert GeluLinearMethod.where_it_is(torch.device("meta")) is None
    assert isinstance(GeluLinearMethod.where_it_is(torch.device("cuda", 1)), GeluLinearMethod)
