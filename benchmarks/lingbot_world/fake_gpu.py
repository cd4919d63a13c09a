"""Lets torch plan for a GPU where there is none: tensors without memory, kernels without a launch.

Everything here changes the process that it runs in, so that a process of its own is the place.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._dynamo import device_interface

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
