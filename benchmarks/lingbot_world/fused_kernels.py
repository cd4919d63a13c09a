"""Counts the kernels that compiled code would launch on an H200, without compiling anything.

Inductor decides in its scheduler which operators become one kernel, and that needs no GPU, no
Triton and no C compiler. The plan of each graph is taken from there; no code is generated. Torch is
led to plan for a GPU where there is none, which changes the process: one of its own is the place.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor
from torch._dynamo import device_interface
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

from benchmarks.lingbot_world.kernel_counter import FORMULAS, Kernel, Kind, note
from vllm_omni.diffusion.attention.sdpa import SdpaAttention

_GPU = torch.device("cuda", 0)
_PRODUCTS = ("mm", "convolution")
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_DEVICE_TYPES = 16
_CUDA, _META = 1, 14
"""Places in torch's list of kinds of device (``c10/core/DeviceType.h``)."""

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20, total_memory=141 * 10**9,
)  # fmt: skip
"""What the compiler asks of a device."""


def allow_fake_cuda() -> None:
    """Let operators run on FakeTensors of device ``cuda`` in a build of torch without CUDA.

    Torch makes the device of an operator current through a table with one entry for each kind of
    device. That of ``meta`` does nothing, which is right for tensors without memory, too.
    """
    if torch.version.cuda is not None:
        return
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(
        core, "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[_CUDA] = guards[_META]


class _H200Interface(device_interface.CudaInterface):
    """An H200 as the compiler's planning sees it."""

    class Worker:
        """The same, for the processes that compile."""

        get_device_properties = staticmethod(lambda _device=None: H200)
        current_device = staticmethod(lambda: 0)

    get_device_properties = staticmethod(lambda _device=None: H200)
    get_compute_capability = staticmethod(lambda _device=None: 10 * H200.major + H200.minor)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda **_: True)
    memory_allocated = staticmethod(lambda _device=None: 0)


@contextmanager
def pretended_h200() -> Iterator[None]:
    """Let the compiler plan for an H200 within the block."""
    allow_fake_cuda()
    device_interface.get_interface_for_device("cuda")  # fills the table
    found = {"cuda": _H200Interface, "cuda:0": _H200Interface}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, found))
        for name, answer in (("properties", H200), ("capability", (H200.major, H200.minor))):
            told = mock.Mock(return_value=answer)
            stack.enter_context(mock.patch.object(torch.cuda, f"get_device_{name}", told))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        yield


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
