"""A device called ``npu`` made of host memory, and a ``torch_npu`` for it: both without a compiler.

Tensors are of device type ``npu``, their bytes lie in host memory: a DLPack capsule of a CPU
tensor is relabelled and imported. Operators map their arguments to CPU tensors over the same
bytes and run there; views are views of the same storage. The vendor's operators have its schemas.
Streams and events do nothing, so this device shows placement, branches, arguments and shapes, and
never an order of work: that is what ``make test-npu-sim`` is for.

It replaces a part of torch for the whole process: use it in a process of its own.
"""

import ctypes
import sys
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.npu_sim.operators import BODIES, Call

SCHEMAS = Path(__file__).with_name("operator_schemas.txt")
_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_DEVICE_TYPE_OFFSET = 8
"""Of the 32-bit device type inside a DLTensor, after its data pointer."""
_HOST_INDICES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}

calls: list[Call] = []
"""Calls of the vendor's operators."""

_libraries: list[torch.library.Library] = []
_torch_empty = torch.empty
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _relabel(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor.detach())
    address = _capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET).value = device_type
    return torch._C._from_dlpack(capsule)


def _host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes."""
    return _relabel(tensor, _DLPACK_CPU) if tensor.device.type == "npu" else tensor


def _device_view(tensor: torch.Tensor) -> torch.Tensor:
    """A device tensor over the bytes of a CPU tensor that starts its storage."""
    dense = tensor.storage_offset() == 0 and (tensor.is_contiguous() or all(tensor.stride()))
    return _relabel(tensor if dense else tensor.contiguous(), _DLPACK_EXTENSION)


def _to_host(value):
    if isinstance(value, torch.Tensor):
        return _host_view(value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _run_on_host(operator, args, kwargs, body=None):
    """Run ``body`` (the operator itself if not given) on the host, return device tensors."""
    schema = operator._schema
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    kinds = {x.device.type for x in tensors if x.dim()}
    if len(kinds) > 1 and schema.name not in _HOST_INDICES:
        raise RuntimeError(f"{schema.name}: tensors on {sorted(kinds)}; expected one device")
    host_args, host_kwargs = pytree.tree_map(_to_host, (args, dict(kwargs)))
    host_kwargs.pop("pin_memory", None)
    bound = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    if outs:
        return _run_into(operator, host_args, host_kwargs, {name: bound[name] for name in outs})
    result = (body or operator)(*host_args, **host_kwargs)
    several = len(schema.returns) > 1
    values = list(result) if several else [result]
    outputs = [
        _output(declared, value, schema, bound)
        for declared, value in zip(schema.returns, values, strict=False)
    ]
    return tuple(outputs) if several else outputs[0] if outputs else None


def _output(declared, value, schema, bound):
    alias = declared.alias_info
    if alias is None or not alias.is_write:
        return pytree.tree_map_only(torch.Tensor, _device_view, value)
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and argument.alias_info.before_set & alias.before_set:
            return bound[argument.name]
    raise AssertionError(f"{schema.name} returns an argument that it does not name")


def _run_into(operator, args, kwargs, outs):
    fresh = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in outs.items()}
    operator(*args, **{k: v for k, v in kwargs.items() if k not in outs}, **fresh)
    for name, tensor in outs.items():
        _resize(tensor, fresh[name].shape)
        _host_view(tensor).copy_(fresh[name])
    tensors = tuple(outs.values())
    return tensors if len(tensors) > 1 else tensors[0]


def _empty(size, *, dtype=None, memory_format=None, **_):
    layout = memory_format or torch.contiguous_format
    return _device_view(torch.empty(size, dtype=dtype, memory_format=layout))


def _empty_strided(size, stride, *, dtype=None, **_):
    return _device_view(torch.empty_strided(size, stride, dtype=dtype))


def _copy_(target, source, non_blocking=False):
    del non_blocking
    _host_view(target).copy_(_host_view(source))
    return target


def _resize(tensor, size, memory_format=None):
    del memory_format
    if tuple(size) == tuple(tensor.shape):
        return tensor
    stride = torch.empty(size, device="meta").stride()
    needed = torch.Size(size).numel() * tensor.element_size()
    if needed > tensor.untyped_storage().nbytes():
        storage = _empty(size, dtype=tensor.dtype).untyped_storage()
    else:
        storage = tensor.untyped_storage()
    torch.ops.aten.set_.source_Storage_storage_offset(tensor, storage, 0, size, stride)
    return tensor


def _on_host(operator):
    return lambda *args, **kwargs: _run_on_host(operator, args, kwargs)


def _shared_with_cpu(operator):
    """Kernels that touch sizes and strides only are the same on every device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: operator.redispatch(keys, *args, **kwargs)


class _Event:
    """Done when it is recorded."""

    def __init__(self, *, enable_timing=False):
        del enable_timing
        self.recorded_s = 0.0

    def record(self, stream=None):
        del stream
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, later):
        return (later.recorded_s - self.recorded_s) * 1000.0

    def query(self):
        return True

    def synchronize(self):
        pass


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.npu")
    module.Event = _Event
    module.current_stream = lambda *_: None
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = module.manual_seed_all = lambda *_: None
    module.empty_cache = lambda: None
    module.mem_get_info = lambda *_: (60 << 30, 64 << 30)
    module.memory_allocated = module.memory_reserved = lambda *_: 0
    module.max_memory_allocated = lambda *_: 1 << 20
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.config = types.SimpleNamespace(allow_internal_format=False)
    return module


def _unpinned_empty(*size, pin_memory=False, **options):
    """This device has no allocator of pinned memory: host tensors are ordinary ones."""
    del pin_memory
    return _torch_empty(*size, **options)


def _install_kernels() -> None:
    boxed = torch.library.Library("_", "IMPL")
    boxed.fallback(lambda operator, *a, **k: _run_on_host(operator, a, k), "PrivateUse1")
    aten, kernels = torch.library.Library("aten", "IMPL"), torch.ops.aten
    for name, kernel in {
        "empty.memory_format": _empty, "empty_strided": _empty_strided, "copy_": _copy_,
        "_copy_from": lambda source, target, *_: _copy_(target, source), "resize_": _resize,
        "record_stream": lambda *_: None,
        "convolution_overrideable": _on_host(kernels.convolution.default),
        # Otherwise split into parts that round in other places than the host's kernels.
        "scaled_dot_product_attention": _on_host(kernels.scaled_dot_product_attention.default),
        "native_layer_norm": _on_host(kernels.native_layer_norm.default),
    }.items():  # fmt: skip
        aten.impl(name, kernel, "PrivateUse1")
    for name, operator in {
        "as_strided": kernels.as_strided.default, "view": kernels.view.default,
        "_reshape_alias": kernels._reshape_alias.default, "unfold": kernels.unfold.default,
        "set_.source_Storage": kernels.set_.source_Storage, "set_": kernels.set_.default,
        "set_.source_Storage_storage_offset": kernels.set_.source_Storage_storage_offset,
        "set_.source_Tensor": kernels.set_.source_Tensor,
    }.items():  # fmt: skip
        aten.impl(name, _shared_with_cpu(operator), "PrivateUse1")
    aten.impl("_pin_memory", lambda tensor, *_: tensor, "CPU")
    aten.impl("is_pinned", lambda *_: False, "CPU")
    _libraries.extend((boxed, aten))
    torch.empty = _unpinned_empty


def _vendor_kernel(name: str, schema: torch._C.FunctionSchema):
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def kernel(*args, **kwargs):
        arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
        calls.append(Call(name, arguments))
        return _run_on_host(getattr(torch.ops.npu, name).default, (), arguments, BODIES[name])

    return kernel


def install() -> None:
    """Register the device with torch, and ``torch_npu`` with Python; once per process."""
    device_module = _device_module()
    _setup_privateuseone_for_python_backend("npu", backend_module=device_module)
    _install_kernels()
    library = torch.library.Library("npu", "DEF")
    module = types.ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.npu = device_module
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        if line.startswith("npu::"):
            schema = torch._C.parse_schema(line)
            name = schema.name.removeprefix("npu::")
            library.define(line.removeprefix("npu::"))
            library.impl(name, _vendor_kernel(name, schema), "PrivateUse1")
            setattr(module, name, getattr(torch.ops.npu, name))
    sys.modules["torch_npu"] = module
    _libraries.append(library)
