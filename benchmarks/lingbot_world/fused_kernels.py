"""Counts the kernels that compiled code would launch on an H200, without compiling anything.

Inductor decides in its scheduler which operators become one kernel, and that needs no GPU, no
Triton and no C compiler. The plan of each graph is taken from there; no code is generated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from benchmarks.lingbot_world.fake_gpu import pretended_h200
from benchmarks.lingbot_world.kernel_counter import FORMULAS, Kernel, Kind, note
from vllm_omni.diffusion.attention.sdpa import SdpaAttention

_GPU = torch.device("cuda", 0)
_PRODUCTS = ("mm", "convolution")
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001


class PlannedAttention(SdpaAttention):
    """Calls the operator of a fused kernel, which torch would choose on the GPU alone."""

    @override
    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Return a tensor of the right shape and layout."""
        heads_first = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attended, *_ = _FLASH(*heads_first, scale=scale)
        return attended[0].transpose(0, 1)


def planned_norm_silu(
    x: Float[Tensor, "time height width channels"],
    scale: Float[Tensor, " channels"],
    target: Float[Tensor, "time height width channels"],
) -> None:
    """Count the kernel of ``vae/norm_silu.py``: it reads ``x`` and writes ``target``, once each."""
    note(Kernel("norm_silu", Kind.ELEMENTWISE, x.nbytes + scale.nbytes + target.nbytes))


class _PlannedError(Exception):
    """Ends a compilation after its plan."""

    def __init__(self, kernels: list[Kernel]) -> None:
        super().__init__("planned")
        self.kernels = kernels


@contextmanager
def inductor_plans() -> Iterator[None]:
    """Let what is compiled within the block add its planned kernels to the current counter."""
    with ExitStack() as stack:
        stack.enter_context(pretended_h200())
        # There is nothing for workers, and no GPU on which a CUDA build could time padded products.
        stack.enter_context(config.patch(compile_threads=1, shape_padding=False))
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", _stop_at_plan))
        stack.enter_context(mock.patch("torch._inductor.compile_fx.compile_fx", _planned))
        yield


def _planned(graph: GraphModule, inputs: Sequence[object], **_: object) -> Callable[..., object]:
    """Take the place of inductor: plan the graph for an H200, and run it on ``meta``."""
    fake = detect_fake_mode(inputs)
    assert fake is not None, "the compiler's front traces with fake tensors"
    with fake:
        on_gpu = [_moved(value) if isinstance(value, Tensor) else value for value in inputs]
    kernels: list[Kernel] = []
    try:
        compile_fx(deepcopy(graph), on_gpu)
    except InductorError as error:
        if not isinstance(error.inner_exception, _PlannedError):
            raise
        kernels = error.inner_exception.kernels

    def run(*values: object) -> object:
        note(*kernels)
        with _disable_current_modes():
            return graph(*values)

    return run


def _moved(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_GPU)


def _stop_at_plan(lowering: GraphLowering) -> None:
    lowering.init_wrapper_code()
    lowering._update_scheduler()  # noqa: SLF001
    nodes = lowering.scheduler.nodes
    raise _PlannedError([_kernel(node) for node in nodes if not _launches_nothing(node)])


def _launches_nothing(node: BaseSchedulerNode) -> bool:
    return isinstance(node, NopKernelSchedulerNode) or not node.get_read_write_buffers_sizes()


def _kernel(node: BaseSchedulerNode) -> Kernel:
    moved = node.get_read_write_buffers_sizes()
    if not isinstance(node, ExternKernelSchedulerNode):
        return Kernel("fused", Kind.ELEMENTWISE, moved)
    name, kind = node.node.python_kernel_name.rpartition("extern_kernels.")[2], Kind.ELEMENTWISE
    if "attention" in name:
        kind = Kind.ATTENTION
    elif any(product in name for product in _PRODUCTS):
        kind = Kind.PRODUCT
    return Kernel(name, kind, moved, sum(map(_flops, node.node.origins)))


def _flops(origin: Node) -> int:
    """Count as for an eager kernel: the scheduler's own estimate knows no product with GELU."""
    formula = FORMULAS.get(origin.target.overloadpacket)
    if formula is None:
        return 0
    operands = [value.meta["val"] if isinstance(value, Node) else value for value in origin.args]
    return formula(*operands, out_val=origin.meta["val"])
