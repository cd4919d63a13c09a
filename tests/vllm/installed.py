"""Whether vLLM is in this environment; ``make test-vllm`` makes one that has it."""

from importlib.util import find_spec

import pytest

requires_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm has it"
)

BACKENDS = ("native", pytest.param("vllm", marks=requires_vllm))
"""Both implementations of the linears, for tests that ask the same of them."""

VLLM_WARNS = pytest.mark.filterwarnings("default")
"""vLLM and what it imports warn of their own affairs."""
