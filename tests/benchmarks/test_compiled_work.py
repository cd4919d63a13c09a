"""What a steady chunk launches and moves with compiled blocks, by the plans of torch's compiler.

Runs in a process of its own: the compiler and the shape checks of the test run exclude each other.
"""

import json
import subprocess
import sys
from dataclasses import astuple

import pytest
import torch

from benchmarks.lingbot_world.chunk_times import ChunkTimes, PartTime, Rates, part_time, rates_of
from benchmarks.lingbot_world.count_work import count_vae
from benchmarks.lingbot_world.kernel_counter import Kernel, Kind

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.benchmark,
    pytest.mark.cpu,
    pytest.mark.skipif(
        torch.__version__ < (2, 13),
        reason="the ceilings are of torch 2.13; older compilers fuse less",
    ),
]

_PROGRAM = """
import json
from dataclasses import astuple
from benchmarks.lingbot_world.count_work import count_transformer
from benchmarks.lingbot_world.fused_kernels import inductor_plans

def parts(ranks, layers):
    made, _ = count_transformer(ranks, layers, compiled=True)
    return {name: [astuple(kernel) for kernel in kernels] for name, kernels in made.items()}

with inductor_plans():
    print(json.dumps({ranks: [parts(ranks, layers) for layers in (1, 2)] for ranks in (1, 4)}))
"""
LAYERS = 40
PRODUCTS, FUSED = {1: 6, 4: 7}, {1: 7, 4: 8}
"""Four ranks make and normalise the queries apart, while keys and values travel."""
WINDOW_WRITES = {1: 2, 4: 8}
"""Copies of keys and values into the window; four ranks also pack and unpack what they exchange."""


@pytest.fixture(scope="module")
def counted():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def added(counted, ranks, part):
    """The kernels that one more layer adds to a part."""
    one, two = ([tuple(kernel) for kernel in parts[part]] for parts in counted[str(ranks)])
    for kernel in one:
        two.remove(kernel)
    return two


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_compiled_layer_is_at_most_eight_fused_kernels(counted, ranks):
    """Beside products and two attentions; copies around the attention are not fused."""
    layer = added(counted, ranks, "commit")
    assert 4 * len(layer) == len(added(counted, ranks, "probes"))
    by_kind = {kind: [k[0] for k in layer if k[1] == kind] for kind in {k[1] for k in layer}}
    elementwise = by_kind.pop("elementwise")
    assert elementwise.count("fused") <= FUSED[ranks]
    assert len(elementwise) <= FUSED[ranks] + WINDOW_WRITES[ranks]
    messages = {"message": 3, "wait": 3} if ranks > 1 else {}
    assert {kind: len(names) for kind, names in by_kind.items()} == {
        "product": PRODUCTS[ranks], "attention": 2, **messages
    }  # fmt: skip


@pytest.mark.parametrize(("ranks", "most_gb", "most_kernels"), [(1, 266.4, 3799), (4, 95.9, 5405)])
def test_a_compiled_chunk_keeps_its_ceilings(counted, ranks, most_gb, most_kernels):
    moved = kernels = 0
    for part in ("camera", "probes", "commit"):
        one = counted[str(ranks)][0][part]
        whole = [*one, *((LAYERS - 1) * added(counted, ranks, part))]
        whole = [kernel for kernel in whole if kernel[1] not in {"message", "wait"}]
        here = sum(size for _, kind, size, _ in whole if kind == "elementwise")
        moved, kernels = moved + here, kernels + len(whole)
    assert moved / 1e9 <= most_gb
    assert kernels <= most_kernels


@pytest.fixture(scope="module")
def times(counted):
    """Whole chunks: what a second layer takes is what each of the others takes."""
    made = {}
    for ranks in (1, 4):
        rates = rates_of(ranks)
        parts = [
            {name: part_time(map(kernel_of, kernels), rates) for name, kernels in few.items()}
            for few in counted[str(ranks)]
        ]
        vae = count_vae(ranks, fused=True)
        made[ranks] = ChunkTimes(
            ranks,
            *(grown(*(few[name] for few in parts)) for name in ("camera", "probes", "commit")),
            *(part_time(vae[name], rates) for name in ("decode", "encode")),
        )
    return made


def kernel_of(fields):
    name, kind, moved, flops = fields
    return Kernel(name, Kind(kind), moved, flops)


def grown(one, two):
    pairs = zip(astuple(one), astuple(two), strict=True)
    return PartTime(*(first + (LAYERS - 1) * (second - first) for first, second in pairs))


def test_counted_goals_are_met(times):
    """At the rates of ``chunk_times.py``; nothing here was measured."""
    alone, four = times[1], times[4]
    assert alone.transformer.whole <= 1715
    assert alone.decode.whole <= 95
    assert four.transformer.whole <= 490
    assert four.decode.whole <= 32
    assert four.served_first_ten <= 540
    assert four.control_to_pixels <= 470


def test_half_of_the_exchange_hides_behind_the_queries(times):
    exchanged = times[4].transformer
    assert exchanged.waited <= 0.53 * exchanged.messages
    assert times[1].transformer.messages == 0


def test_a_message_costs_what_the_kernels_beside_it_leave():
    """By hand: products take 2 ms, messages 3 ms, and these come one after the other."""
    rates = Rates(product=1, attention=1, convolution=1, elementwise=1, link=1000, message_us=1000)
    product = Kernel("mm", Kind.PRODUCT, 0, 2 * 10**9)
    sent = [Kernel(name, Kind.MESSAGE, 2 * 10**9) for name in ("a", "b")]
    waits = [Kernel(name, Kind.WAIT, 0) for name in ("a", "b")]
    assert part_time([sent[0], waits[0], product], rates) == PartTime(2, 3, 5)
    assert part_time([sent[0], product, waits[0]], rates) == PartTime(2, 3, 3)
    assert part_time([*sent, waits[0], product, waits[1]], rates) == PartTime(2, 6, 6)
    assert part_time([sent[0], product, product, waits[0]], rates) == PartTime(4, 3, 4)
