"""What a steady chunk launches and moves with compiled blocks, by the plans of torch's compiler.

Runs in a process of its own: the compiler and the shape checks of the test run exclude each other.
"""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.benchmark, pytest.mark.cpu]

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
def test_a_compiled_layer_is_seven_fused_kernels(counted, ranks):
    """Beside seven products and two attentions; copies around the attention are not fused."""
    layer = added(counted, ranks, "commit")
    assert 4 * len(layer) == len(added(counted, ranks, "probes"))
    by_kind = {kind: [k[0] for k in layer if k[1] == kind] for kind in {k[1] for k in layer}}
    elementwise = by_kind.pop("elementwise")
    assert elementwise.count("fused") <= 7
    assert len(elementwise) <= 7 + WINDOW_WRITES[ranks]
    assert {kind: len(names) for kind, names in by_kind.items()} == {"product": 6, "attention": 2}


@pytest.mark.parametrize(("ranks", "most_gb", "most_kernels"), [(1, 266.4, 3799), (4, 95.8, 5007)])
def test_a_compiled_chunk_keeps_its_ceilings(counted, ranks, most_gb, most_kernels):
    moved = kernels = 0
    for part in ("camera", "probes", "commit"):
        one = counted[str(ranks)][0][part]
        whole = [*one, *((LAYERS - 1) * added(counted, ranks, part))]
        here = sum(size for _, kind, size, _ in whole if kind == "elementwise")
        moved, kernels = moved + here, kernels + len(whole)
    assert moved / 1e9 <= most_gb
    assert kernels <= most_kernels
