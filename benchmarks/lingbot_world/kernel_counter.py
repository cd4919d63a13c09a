"""Counts the kernels that eager mode would launch, with the bytes and FLOPs of each.

It watches operators on the ``meta`` device: shapes and strides are real, nothing is computed, and
an operator that has to read a value back from the device raises there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_CONVOLUTION = _ATEN.convolution.default
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_LAUNCH_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh",
}  # fmt: skip
FORMULAS = {**flop_registry, _ATEN._addmm_activation: flop_registry[_ATEN.addmm]}  # noqa: SLF001
"""FLOPs of an operator by its operands."""
_WRITE_ONLY = {"copy_", "fill_", "zero_", "normal_"}
"""Operators that do not read the tensor that they write."""


class Kind(StrEnum):
    """What bounds a kernel."""

    PRODUCT = "product"
    """Matrix products and convolutions."""
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    """Everything that computes next to nothing per byte: copies, casts, norms, activations."""
    UPLOAD = "upload"
    """Copies from the host to the device."""
    MESSAGE = "message"
    """What starts an exchange between ranks; its bytes are those that leave the rank."""
    WAIT = "wait"
    """What lets the next kernels wait for the last message of the same name."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch.

    Attributes:
        operator: name of torch's operator, without its overload.
        moved_bytes: each operand read once and each result written once.
    """

    operator: str
    kind: Kind
    moved_bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """What one kind of kernels adds up to."""

    kernels: int
    moved_bytes: int
    flops: int


def launched(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Leave out exchanges between ranks, which are counted apart."""
    return [kernel for kernel in kernels if kernel.kind not in {Kind.MESSAGE, Kind.WAIT}]


def note(*kernels: Kernel) -> None:
    """Add kernels, which no operator shows, to the counter within whose block this runs."""
    counter = _get_current_dispatch_mode()
    if isinstance(counter, KernelCounter):
        counter.kernels.extend(kernels)


def totals(kernels: Iterable[Kernel], kind: Kind) -> Totals:
    """Add up the kernels of one kind."""
    chosen = [kernel for kernel in kernels if kernel.kind is kind]
    return Totals(
        len(chosen),
        sum(kernel.moved_bytes for kernel in chosen),
        sum(kernel.flops for kernel in chosen),
    )


class KernelCounter(TorchDispatchMode):
    """Collects the kernels of the ``meta`` tensors that are made in its block.

    A composite operator is counted by its parts, attention as one fused kernel that keeps no
    scores. A convolution with a bias is two kernels, as cuDNN runs it. Operators on host tensors
    launch nothing.

    Attributes:
        kernels: in the order of their launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        """Let modules within the block be compiled."""
        return True

    @override
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count it."""
        named = dict(kwargs or {})
        if func is _ATTENTION:
            return self._attention(*args)
        if func._can_decompose():  # noqa: SLF001
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        made = func(*args, **named)
        if func is _CONVOLUTION:
            made = _laid_out_as_weight(made, args[1])
        self._count(func, args, named, made)
        return made

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        made = torch.empty_like(query)
        self.kernels.append(
            Kernel(
                "scaled_dot_product_attention",
                Kind.ATTENTION,
                sum(_extent(tensor) for tensor in (query, key, value, made)),
                sdpa_flop_count(query.shape, key.shape, value.shape),
            )
        )
        return made

    def _count(
        self, func: OpOverload, args: Sequence[Any], named: Mapping[str, Any], made: object
    ) -> None:
        name = func.overloadpacket.__name__
        read = _tensors([args, {key: value for key, value in named.items() if key != "out"}])
        written = _tensors(made)
        on_device = any(tensor.device.type != "cpu" for tensor in written)
        if func.is_view or name in _LAUNCH_NOTHING or not on_device:
            return
        if name in _WRITE_ONLY:
            read = read[1:]
        moved = sum(_extent(tensor) for tensor in read + written)
        formula: Callable[..., int] | None = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            flops = formula(*args, **named, out_val=made)
            kind = Kind.ATTENTION if "attention" in name else Kind.PRODUCT
            self.kernels.append(Kernel(name, kind, moved, flops))
            if func is _CONVOLUTION and args[2] is not None:
                bias = 2 * _extent(written[0])
                self.kernels.append(Kernel("convolution bias", Kind.ELEMENTWISE, bias))
        elif any(tensor.device.type == "cpu" and tensor.dim() for tensor in read):
            self.kernels.append(Kernel(name, Kind.UPLOAD, _extent(written[0])))
        else:
            self.kernels.append(Kernel(name, Kind.ELEMENTWISE, moved))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _laid_out_as_weight(made: Tensor, weight: Tensor) -> Tensor:
    """Return a result in the layout that cuDNN gives it, which ``meta`` does in two axes only."""
    layout = _CHANNELS_LAST.get(weight.dim())
    if layout is None or not weight.is_contiguous(memory_format=layout):
        return made
    return torch.empty_like(made, memory_format=layout)


def _extent(tensor: Tensor) -> int:
    """Count the bytes of memory behind a tensor: what is broadcast is read once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1
    for size, stride in steps:
        elements *= size if stride else 1
    return elements * tensor.element_size()
