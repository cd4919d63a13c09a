"""A module ``torch_npu`` for the Python device: operators checked by the vendor's schemas."""

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from tests.npu import operators, python_device


@dataclass(frozen=True)
class Call:
    """One operator call, its arguments by the names of the schema."""

    name: str
    arguments: dict[str, Any]


calls: list[Call] = []
_libraries: list[torch.library.Library] = []


def _kernel(name: str, schema: torch._C.FunctionSchema):
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def kernel(*args, **kwargs):
        arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
        calls.append(Call(name, arguments))
        operator = getattr(torch.ops.npu, name).default
        return python_device.run_on_host(operator, (), arguments, operators.BODIES[name])

    return kernel


def install() -> types.ModuleType:
    """Make device and module; once per process."""
    device_module = python_device.install()
    library = torch.library.Library("npu", "DEF")
    module = types.ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.npu = device_module
    for line in operators.schema_lines():
        schema = torch._C.parse_schema(line)
        name = schema.name.removeprefix("npu::")
        library.define(line.removeprefix("npu::"))
        library.impl(name, _kernel(name, schema), "PrivateUse1")
        setattr(module, name, getattr(torch.ops.npu, name))
    sys.modules["torch_npu"] = module
    _libraries.append(library)
    return module
