"""Kernels of the simulated device: what torch's dispatcher calls, run on host memory.

A kernel sees addresses, sizes and strides, as a launched one does: it keeps nothing alive. When
its stream is deferred, outputs get their shapes from a run on zeros and their values when the
stream comes to the kernel.
"""

import ctypes
import math
from collections import Counter
from dataclasses import dataclass

import torch

from tests.npu_sim.library import QUEUE, RUN_NOW, TAPE, Runtime
from tests.npu_sim.operators import BODIES, Call

transfers: Counter[str] = Counter()
"""Copies between host and device: ``to_device``, ``to_host``, and ``read_back`` of values that
the host needs before it can go on; ``blocking`` counts those that wait for the stream."""
calls: list[Call] = []
"""Calls of the vendor's own operators."""

_READS_VALUES = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero",
    "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
}  # fmt: skip
_HOST_INDICES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}


def on_npu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "npu"


def current_stream(device: torch.device | None) -> int:
    """The stream that work of this device goes to now, as the runtime knows it."""
    from torch_npu import _C  # not before the runtime is in place

    index = None if device is None else torch.device(device).index
    if index is None:
        index = torch.npu.current_device()
    return _C._npu_getCurrentRawStream(index)


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a device tensor, without a hold on them."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Span":
        address = tensor.data_ptr() if tensor.numel() else 0
        return cls(address, tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    def open(self) -> torch.Tensor:
        """A host tensor over these bytes."""
        if not self.address:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        reach = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        memory = (ctypes.c_uint8 * (reach * self.dtype.itemsize)).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=self.dtype)
        return flat.as_strided(self.size, self.stride)

    def zeros(self) -> torch.Tensor:
        """A host tensor of this shape, for a run that only asks for shapes."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype).zero_()


def _each(function, value):
    """``function`` of an argument, or of every member of one that is a list."""
    if isinstance(value, list | tuple):
        return [function(member) for member in value]
    return function(value)


def _tensors(values) -> list[torch.Tensor]:
    """All tensors among values and in their lists, in order."""
    found = []
    for value in values:
        members = value if isinstance(value, list | tuple) else (value,)
        found.extend(member for member in members if isinstance(member, torch.Tensor))
    return found


def _as_values(results) -> list:
    return list(results) if isinstance(results, list | tuple) else [results]


def _described(value):
    """An argument as a launch keeps it."""
    if isinstance(value, torch.Tensor):
        return Span.of(value) if value.device.type == "npu" else value.clone()
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "npu":
        return _host_generator(value)
    return value


def _opened(value):
    return value.open() if isinstance(value, Span) else value


def _zeroed(value):
    return value.zeros() if isinstance(value, Span) else value


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Draws by seed and offset, which moves on with every draw, as on the device."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % (1 << 63))


class Kernel:
    """One operator on the simulated device."""

    def __init__(self, operator: torch._ops.OpOverload, runtime: Runtime) -> None:
        self._operator, self._runtime = operator, runtime
        schema = operator._schema
        self._name, self._returns = schema.name, schema.returns
        self._arguments = schema.arguments
        self._names = [argument.name for argument in schema.arguments]
        self._body = schema.name[5:] if schema.name.startswith("npu::") else None
        self._outs = [argument.name for argument in schema.arguments if argument.is_out]
        self._all_alias = all(_is_written(value) for value in schema.returns)

    def __call__(self, *args, **kwargs):
        bound = dict(zip(self._names, args, strict=False)) | kwargs
        if self._body is not None:
            # Bodies take arguments by the schema's names, whichever way the caller gave them.
            args, kwargs = (), {a.name: a.default_value for a in self._arguments} | bound
        tensors = _tensors(bound.values())
        self._check_devices(tensors)
        described = (
            [_each(_described, value) for value in args],
            {name: _each(_described, value) for name, value in kwargs.items()},
        )
        if self._body is not None:
            calls.append(Call(self._body, described[1]))
        device = next((x.device for x in tensors if on_npu(x)), None) or bound.get("device")
        stream = current_stream(device)
        mode = self._runtime.mode(stream)
        if self._name in _READS_VALUES:
            transfers["read_back"] += 1
            torch.npu.current_stream(device).synchronize()  # raises while the stream is captured
            mode = RUN_NOW
        if mode == RUN_NOW:
            results = self._compute(described, _opened)
            outputs = self._outputs(results, bound, device)
            _write(results, self._targets(outputs, bound))
            return outputs
        shapes = None if self._all_alias and not self._outs else self._compute(described, _zeroed)
        outputs = self._outputs(shapes, bound, device)
        targets = self._targets(outputs, bound)
        if mode == TAPE:
            self._poison(targets)
        self._runtime.launch(stream, lambda: _write(self._compute(described, _opened), targets))
        return outputs

    def _check_devices(self, tensors: list[torch.Tensor]) -> None:
        on_host = any(x.device.type == "cpu" and x.dim() for x in tensors)
        if not on_host or not any(on_npu(x) for x in tensors):
            return
        if self._name not in _HOST_INDICES:
            raise RuntimeError(f"{self._name}: expected all tensors on one device, got npu and cpu")
        transfers["to_device"] += 1

    def _compute(self, described, how):
        args = [_each(how, value) for value in described[0]]
        kwargs = {name: _each(how, value) for name, value in described[1].items()}
        kwargs.pop("pin_memory", None)
        body = self._operator if self._body is None else BODIES[self._body]
        if not self._outs:
            return body(*args, **kwargs)
        # The shapes of outs are the operator's to choose: it gets empty ones.
        outs = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in self._outs}
        body(*args, **kwargs | outs)
        return tuple(outs.values())

    def _outputs(self, results, bound, device):
        """Device tensors for the results: arguments that were written, or fresh memory."""
        if self._outs:
            for name, result in zip(self._outs, results, strict=True):
                if bound[name].shape != result.shape:
                    bound[name].resize_(result.shape)
            written = tuple(bound[name] for name in self._outs)
            return written if len(written) > 1 else written[0]
        several = len(self._returns) > 1
        values = list(results) if several and results is not None else [results]
        values = values * len(self._returns) if results is None else values
        outputs = tuple(
            self._written(declared, bound) if _is_written(declared) else _fresh(value, device)
            for declared, value in zip(self._returns, values, strict=False)
        )
        return outputs if several else outputs[0] if outputs else None

    def _written(self, declared, bound):
        for argument in self._arguments:
            alias = argument.alias_info
            if alias and alias.is_write and alias.before_set & declared.alias_info.before_set:
                return bound[argument.name]
        raise AssertionError(f"{self._name} returns an argument that it does not name")

    def _targets(self, outputs, bound) -> list[Span | None]:
        """Where each result goes; ``None`` for one that the kernel writes in place."""
        in_place = set() if self._outs else {id(value) for value in bound.values()}
        return [None if id(x) in in_place else Span.of(x) for x in _tensors(_as_values(outputs))]

    @staticmethod
    def _poison(targets: list[Span | None]) -> None:
        """Outputs of a graph are undefined before its first replay."""
        for target in targets:
            if target is not None and target.dtype.is_floating_point:
                target.open().fill_(math.nan)


def _is_written(declared) -> bool:
    return declared.alias_info is not None and declared.alias_info.is_write


def _fresh(value, device):
    def allocate(result: torch.Tensor) -> torch.Tensor:
        dense = result if all(result.stride()) else result.contiguous()
        return torch.empty_strided(
            dense.size(), dense.stride(), dtype=dense.dtype, device=device or "npu"
        )

    return _each(lambda x: allocate(x) if isinstance(x, torch.Tensor) else x, value)


def _write(results, targets: list[Span | None]) -> None:
    for result, target in zip(_tensors(_as_values(results)), targets, strict=False):
        if target is not None:
            target.open().copy_(result)


class Copy:
    """``copy_`` between any two places, in stream order where the hardware can."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, target, source, non_blocking=False):
        device = (target if on_npu(target) else source).device
        stream = current_stream(device)
        if on_npu(target) != on_npu(source):
            transfers["to_device" if on_npu(target) else "to_host"] += 1
            if not non_blocking or not (source if on_npu(target) else target).is_pinned():
                transfers["blocking"] += 1
                torch.npu.current_stream(device).synchronize()  # raises while it is captured
                _place(target).copy_(_place(source))
                return target
        to, from_ = (Span.of(x) if on_npu(x) else x for x in (target, source))
        if self._runtime.mode(stream) in {QUEUE, TAPE}:
            # A host tensor is held until then, as torch_npu's allocator of pinned memory does.
            self._runtime.launch(stream, lambda: _opened(to).copy_(_opened(from_)))
        else:
            _opened(to).copy_(_opened(from_))
        return target


def _place(tensor: torch.Tensor) -> torch.Tensor:
    return Span.of(tensor).open() if on_npu(tensor) else tensor


def clone(tensor, *, memory_format=None):
    layout = memory_format or torch.preserve_format
    return torch.empty_like(tensor, memory_format=layout).copy_(tensor)
