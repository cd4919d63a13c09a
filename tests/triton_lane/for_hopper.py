"""Compiles Triton's functions for an H100 or H200 down to machine code, by its own ptxas."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from benchmarks.lingbot_world.count_work import count_transformer
from benchmarks.lingbot_world.fused_kernels import _PlannedError, inductor_plans

HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]
_WARPS = 8
# Any of those that torch's tuner would try.
_BLOCKS = {"poi": {"XBLOCK": 1024}, "red": {"XBLOCK": 1, "R0_BLOCK": 2048}, "per": {"XBLOCK": 1}}
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)


def machine_code(
    function: object,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    attributes: Mapping[tuple[int, ...], object],
) -> Mapping[str, object]:
    """Compile a function; the result has its ``ptx`` and ``cubin``."""
    source = ASTSource(function, dict(types), dict(constants), dict(attributes))
    return compile_kernel(source, target=HOPPER, options={"num_warps": _WARPS}).asm


def generated_sources() -> dict[str, str]:
    """Let torch's compiler write the kernels of a layer at the real shapes, by name."""
    graphs: list[str] = []
    generate = GraphLowering.codegen

    def keep(lowering: GraphLowering) -> object:
        graphs.append(generate(lowering)[0].value)
        raise _PlannedError([])

    with ExitStack() as stack:
        stack.enter_context(_hopper_is_there())
        stack.enter_context(inductor_plans())
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", keep))
        count_transformer(1, layers=1, compiled=True)
    return dict(found for graph in graphs for found in _KERNEL.findall(graph))


def compile_generated(name: str, source: str, folder: Path) -> Mapping[str, object]:
    """Compile one of :func:`generated_sources`, with one choice of block sizes."""
    path = folder / "kernel.py"
    path.write_text(source)
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    with _hopper_is_there(), mock.patch.object(triton_helpers, "set_driver_to_gpu"), _untuned():
        spec.loader.exec_module(module)
        meta, function = module.__dict__[name]
        sizes = _BLOCKS[name.split("_")[1]]
        constants = {key: size for key, size in sizes.items() if key in meta["signature"]}
        attributes = {key: value for config in meta["configs"] for key, value in config.items()}
        return machine_code(function, meta["signature"], meta["constants"] | constants, attributes)


@contextmanager
def _hopper_is_there() -> Iterator[None]:
    """Answer Triton's question for the GPU of this machine."""
    there = SimpleNamespace(get_current_target=lambda: HOPPER)
    with mock.patch.object(driver, "_active", there):
        yield


@contextmanager
def _untuned() -> Iterator[None]:
    """Let the decorators that tune generated kernels keep what they are given."""

    def keep(*_: object, triton_meta: Mapping[str, object], **__: object) -> object:
        return lambda function: (triton_meta, function)

    names = ("pointwise", "reduction", "persistent_reduction")
    with mock.patch.multiple(triton_heuristics, **dict.fromkeys(names, keep)):
        yield
