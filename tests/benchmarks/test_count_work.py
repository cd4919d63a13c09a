"""What a steady chunk launches and moves at the real shapes, with ceilings that it must keep.

Nothing is computed: the modules run on ``meta``, where an operator that reads a value back raises.
"""

import json
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from benchmarks.lingbot_world import count_work
from benchmarks.lingbot_world.count_work import (
    TRANSFORMER_PARTS,
    PartKernels,
    RankWork,
    count_kernels,
    count_transformer,
    count_vae,
)
from benchmarks.lingbot_world.kernel_counter import Kernel, KernelCounter, Kind, launched, totals
from benchmarks.lingbot_world.roofline_counts import (
    VARIANTS,
    Model,
    chunk_exchange,
    chunk_flops,
    chunk_traffic,
)
from benchmarks.lingbot_world.roofline_vae import Vae, count_decode, count_encode

pytestmark = [pytest.mark.core_model, pytest.mark.benchmark, pytest.mark.cpu]

MODEL = Model()
TRIMMED = next(variant for variant in VARIANTS if variant.key == "D")
FULL_SIZE = {"height": 480, "width": 832, "latent_frames": 3}
WIDE, ROW = 4 * 6 * 4, 6 * 4
"""Bytes of a float32 tensor [4, 6] and of one of its rows."""

Kernels = dict[str, Counter[Kernel]]


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def one_kernel(work):
    with torch.inference_mode():
        (kernel,) = count_kernels(work)
    return kernel


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: x + 1.0, ("add", Kind.ELEMENTWISE, 2 * WIDE)),
        (lambda x: x.add_(x[:1]), ("add_", Kind.ELEMENTWISE, 2 * WIDE + ROW)),
        (lambda x: x.mul(x[:1].expand(4, 6)), ("mul", Kind.ELEMENTWISE, 2 * WIDE + ROW)),
        (lambda x: x.bfloat16(), ("_to_copy", Kind.ELEMENTWISE, WIDE + WIDE // 2)),
        (lambda x: meta(4, 6).copy_(x), ("copy_", Kind.ELEMENTWISE, 2 * WIDE)),
        (lambda x: torch.clamp(x, 0, 1, out=meta(4, 6)), ("clamp", Kind.ELEMENTWISE, 2 * WIDE)),
        (lambda x: torch.cat([x, x[:1]]), ("cat", Kind.ELEMENTWISE, 2 * (WIDE + ROW))),
        (lambda x: x.t().flatten(), ("clone", Kind.ELEMENTWISE, 2 * WIDE)),
        (lambda _: torch.zeros(6).to("meta"), ("_to_copy", Kind.UPLOAD, ROW)),
    ],
)
def test_bytes_of_one_kernel(work, expected):
    """Equality: exact, by hand."""
    x = meta(4, 6)
    kernel = one_kernel(lambda: work(x))
    assert (kernel.operator, kernel.kind, kernel.moved_bytes) == expected


def test_products_and_attention_by_hand():
    x, weight, bias = meta(4, 6), meta(5, 6), meta(5)
    linear = one_kernel(lambda: F.linear(x, weight, bias))
    assert linear == Kernel("addmm", Kind.PRODUCT, 4 * (24 + 30 + 5 + 20), 2 * 4 * 6 * 5)
    query, key = meta(1, 2, 7, 8), meta(1, 2, 9, 8)
    attention = one_kernel(lambda: F.scaled_dot_product_attention(query, key, key))
    moved = 4 * 2 * 8 * (7 + 9 + 9 + 7)
    name = "scaled_dot_product_attention"
    assert attention == Kernel(name, Kind.ATTENTION, moved, 4 * 2 * 7 * 9 * 8)


def test_a_convolution_keeps_the_layout_of_its_weight_and_adds_its_bias_apart():
    layout = torch.channels_last_3d
    weight = meta(5, 3, 3, 3, 3).contiguous(memory_format=layout)
    with torch.inference_mode(), KernelCounter() as counter:
        made = F.conv3d(meta(1, 3, 4, 6, 6), weight, meta(5), padding=(0, 1, 1))
        made.contiguous(memory_format=layout)
    product, bias = counter.kernels
    assert product.flops == 2 * made.numel() * 3 * 27
    assert (bias.kind, bias.moved_bytes) == (Kind.ELEMENTWISE, 2 * 4 * made.numel())


def test_views_and_host_tensors_launch_nothing():
    def work():
        meta(4, 6).view(6, 4).t().unsqueeze(0).expand(3, 4, 6).chunk(2, dim=-1)
        torch.zeros(4) + torch.ones(4)

    assert count_kernels(work) == []


@pytest.mark.parametrize("read", [torch.Tensor.item, lambda x: torch.equal(x, x), torch.nonzero])
def test_reading_a_value_back_is_an_error(read):
    with KernelCounter(), pytest.raises((RuntimeError, NotImplementedError)):
        read(meta(1))


def parts_of(ranks: int, layers: int) -> tuple[Kernels, int, int]:
    parts, sent = count_transformer(ranks, layers)
    return {name: Counter(made) for name, made in parts.items()}, sent.calls, sent.sent_bytes


@pytest.fixture(scope="module", params=[1, 4])
def chunk(request):
    """A rank's whole transformer: two layers, and what a third adds 38 times.

    That the fourth adds the same kernels, bytes and exchanges as the third is asserted; all layers
    are of one class and one configuration.
    """
    ranks, whole = request.param, {}
    (two, *sent2), (three, *sent3), (four, *sent4) = (parts_of(ranks, n) for n in (2, 3, 4))
    for name in TRANSFORMER_PARTS:
        layer = three[name] - two[name]
        assert four[name] - three[name] == layer
        assert four[name].total() - three[name].total() == layer.total()
        more = Counter({kernel: (MODEL.layers - 2) * count for kernel, count in layer.items()})
        whole[name] = [*(two[name] + more).elements()]
    steps = [b - a for a, b in zip(sent2, sent3, strict=True)]
    assert [b - a for a, b in zip(sent3, sent4, strict=True)] == steps
    calls, sent = (a + (MODEL.layers - 2) * b for a, b in zip(sent2, steps, strict=True))
    return ranks, whole, calls, sent


@pytest.fixture(scope="module")
def vae():
    """By ranks, and whether norm and SiLU are one kernel."""
    return {
        (ranks, fused): count_vae(ranks, fused=fused) for ranks in (1, 4) for fused in (False, True)
    }


def everything(parts) -> list[Kernel]:
    return [kernel for made in parts.values() for kernel in made]


def flops(kernels) -> int:
    return sum(kernel.flops for kernel in kernels)


def elementwise_gb(kernels) -> float:
    return totals(kernels, Kind.ELEMENTWISE).moved_bytes / 1e9


def test_the_transformer_keeps_its_ceilings(chunk):
    """FLOPs are the formula's within 1e-4: it embeds the timesteps, which a session does once."""
    ranks, parts, calls, sent = chunk
    kernels = everything(parts)
    most_gb, most_kernels = {1: (1434.6, 16137), 4: (388.0, 17544)}[ranks]
    assert flops(kernels) * ranks == pytest.approx(chunk_flops(MODEL, TRIMMED).total, rel=1e-4)
    assert flops(kernels) * ranks / 1e12 <= 1142.4
    assert elementwise_gb(kernels) <= most_gb
    assert len(launched(kernels)) <= most_kernels
    formula = chunk_exchange(MODEL, ranks, TRIMMED)
    assert (calls, sent) == (formula.calls, formula.total_bytes)


def test_a_chunk_uploads_eight_small_tensors(chunk):
    """Rays 2, rotary tables 2, and noise of the host's generator 4."""
    _, parts, _, _ = chunk
    uploads = [kernel for kernel in everything(parts) if kernel.kind is Kind.UPLOAD]
    assert len(uploads) <= 8
    assert sum(kernel.moved_bytes for kernel in uploads) <= 8 * 2**20


def test_the_formula_of_eager_bytes_is_what_a_layer_moves():
    """Within 0.5 %: the formula leaves out rows of [1, dim] and sums of [tokens, 1]."""
    three, four = (count_transformer(1, layers)[0]["probes"] for layers in (3, 4))
    counted = elementwise_gb(four) - elementwise_gb(three)
    formula = chunk_traffic(MODEL, forwards=4).elementwise_eager_bytes / MODEL.layers / 1e9
    assert counted == pytest.approx(formula, rel=5e-3)


@pytest.mark.parametrize(
    ("ranks", "fused", "part", "gb", "kernels"),
    [
        (1, False, "decode", 153.6, 1033),
        (1, False, "encode", 94.3, 778),
        (1, False, "uint8", 0.57, 7),
        (4, False, "decode", 39.0, 1638),
        (4, False, "encode", 24.9, 1226),
        (4, False, "uint8", 0.15, 7),
        (1, True, "decode", 82.7, 598),
        (1, True, "encode", 52.9, 463),
        (4, True, "decode", 21.2, 1203),
        (4, True, "encode", 14.5, 911),
    ],
)
def test_the_autoencoder_keeps_its_ceilings(vae, ranks, fused, part, gb, kernels):
    made = vae[ranks, fused][part]
    assert elementwise_gb(made) <= gb
    assert len(made) <= kernels


def test_the_autoencoder_computes_what_the_formula_says(vae):
    """Equality: exact on one rank; of four, each computes one column more at each border."""
    for part, count in (("decode", count_decode), ("encode", count_encode)):
        formula = count(Vae(), **FULL_SIZE, first=False).flops
        assert flops(vae[1, False][part]) == formula
        assert formula / 4 <= flops(vae[4, False][part]) <= 1.03 * formula / 4


def test_the_command_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys):
    """Of two layers, so that it takes a second."""
    parts, sent = count_transformer(1, layers=2)
    few: PartKernels = {"decode": [], "uint8": [], "encode": []}
    monkeypatch.setattr(
        count_work, "count_rank", lambda n: RankWork(n, parts | few, sent, parts | few)
    )
    target = tmp_path / "work.json"
    count_work.main(["--ranks", "1", "--top", "2", "--json", str(target)])
    text = capsys.readouterr().out
    assert "One rank of 1, one steady chunk, eager and compiled" in text
    assert "8 uploads, no read-back" in text
    assert "between two of the first ten" in text
    written = json.loads(target.read_text())["1"]
    counted, bound = written["parts"]["transformer"], written["bounds"]["transformer"]
    assert bound["flops"] == chunk_flops(MODEL, TRIMMED).total
    assert counted["product"]["flops"] == totals(everything(parts), Kind.PRODUCT).flops
    assert written["compiled"]["transformer"] == counted
    assert written["uploads"] == 8
