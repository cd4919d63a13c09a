"""Puts the simulated runtime under torch_npu: whoever imports torch_npu gets both."""

import atexit
import os
import sys
import warnings
from importlib.machinery import PathFinder
from types import ModuleType

from tests.npu_sim.library import Runtime

_OWN_KERNELS = {
    "as_strided", "as_strided_", "view", "view.dtype", "_reshape_alias", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "resize_",
    "resize_as_", "record_stream", "is_pinned", "_pin_memory", "unfold", "squeeze", "squeeze.dim",
    "unsqueeze", "view_as_real", "view_as_complex", "is_set_to", "empty.memory_format",
    "empty_strided", "empty_like", "empty_with_format", "empty_with_swapped_memory",
    "_copy_from_and_resize", "_to_copy", "contiguous", "copy_memory_",
}  # fmt: skip
"""Kernels of torch_npu that handle memory, sizes and strides only: they run as they are."""

_runtime: Runtime | None = None
_libraries: list[object] = []


def runtime() -> Runtime:
    """The runtime of this process."""
    assert _runtime is not None, "torch_npu has not been imported yet"
    return _runtime


class _Finder:
    """Finds torch_npu where it is installed, with the runtime loaded before and kernels after."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _load(module, execute)
        return spec


def _load(module: ModuleType, execute) -> None:
    global _runtime  # noqa: PLW0603 - one device per process
    _runtime = Runtime()
    atexit.register(_runtime.forget_python)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        execute(module)
        _install(_runtime)
    _runtime.set_deferred(on=os.environ.get("NPU_SIM_DEFERRED") == "1")
    if "NPU_SIM_VAE_PATH" in os.environ:
        _set_vae_path(os.environ["NPU_SIM_VAE_PATH"])


def _set_vae_path(name: str) -> None:
    """Let the VAE convolve as on another device, so that sums have the same order."""
    from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath

    ConvPath.choose = classmethod(lambda cls, *_: cls(name))


def hook() -> None:
    """From now on ``import torch_npu`` gives the genuine package on the simulated runtime."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _install(runtime: Runtime) -> None:
    import torch

    from tests.npu_sim import kernels
    from tests.npu_sim.operators import BODIES

    special = {"copy_": kernels.Copy(runtime), "clone": kernels.clone}
    for namespace in ("aten", "npu"):
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        for name in _registered(namespace):
            base, _, overload = name.partition(".")
            packet = getattr(getattr(torch.ops, namespace), base, None)
            known = name not in _OWN_KERNELS if namespace == "aten" else name in BODIES
            if not known or packet is None or (overload or "default") not in packet.overloads():
                continue
            operator = getattr(packet, overload or "default")
            kernel = special.get(name) or kernels.Kernel(operator, runtime)
            library.impl(name, kernel, "PrivateUse1", allow_override=True)


def _registered(namespace: str) -> list[str]:
    import torch

    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    return [
        name.removeprefix(f"{namespace}::") for name in names if name.startswith(f"{namespace}::")
    ]
