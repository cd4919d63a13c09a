"""Every kernel that torch's compiler writes for a layer becomes machine code of an H200."""

import re

import pytest

from tests.triton_lane.for_hopper import compile_generated, generated_sources

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(scope="module")
def sources():
    return generated_sources()


def test_a_layer_is_seven_kernels_that_compile(sources, tmp_path):
    """At the real shapes, in bfloat16; block sizes are one choice of those that are tried there."""
    assert len(sources) == 7
    for name, source in sources.items():
        code = compile_generated(name, source, tmp_path)
        assert code["cubin"], name
        assert re.search(r"^\.target sm_90a?", code["ptx"], re.MULTILINE), name
