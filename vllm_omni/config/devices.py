"""How many devices this process may use, found out without loading a device library."""

from itertools import pairwise
from pathlib import Path

from vllm_omni import envs
from vllm_omni.errors import ConfigError

_NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
_DEV = Path("/dev")


def visible_device_count(platform: str, devices: str | None) -> int | None:
    """Devices that the ranks may use; ``None`` where there is no limit or it cannot be told.

    A ``devices`` list stands over the operator's environment, that over the device nodes.

    Raises:
        ConfigError: if an NPU could not make out the list.
    """
    if platform not in _NODES:
        return None
    if platform == "npu" and devices is not None:
        _check_rising(devices)
    listed = devices if devices is not None else envs.visible_devices(platform)
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip()])
    return len(list(_DEV.glob(_NODES[platform]))) or None


def _check_rising(devices: str) -> None:
    """CANN reads a list up to the first number that does not rise, and drops the rest silently."""
    numbers = [name.strip() for name in devices.split(",")]
    rising = all(name.isdecimal() for name in numbers) and all(
        int(one) < int(next_one) for one, next_one in pairwise(numbers)
    )
    if not rising:
        raise ConfigError(
            f"devices of an NPU must be rising numbers such as '0,1,2,3', got {devices!r}"
        )


def detect_platform() -> str:
    """The platform whose device nodes this machine has, ``"cpu"`` without any."""
    for platform, pattern in _NODES.items():
        if any(_DEV.glob(pattern)):
            return platform
    return "cpu"


def refuse_missing_devices(devices: str) -> None:
    """Refuse a deployment that lists devices where the machine shows none.

    Raises:
        ConfigError: what was looked for, and the setting that asks for the CPU.
    """
    looked = ", ".join(f"{_DEV}/{pattern.split('[')[0]}*" for pattern in _NODES.values())
    raise ConfigError(
        f"devices={devices!r} asks for GPUs or NPUs, but this machine shows none (looked for "
        f"{looked}); see to the driver, or set device: cpu (--device cpu) to run on the CPU, or "
        "cuda or npu where the devices have other names"
    )


def check_device_count(*, ranks: int, visible: int | None, devices: str | None) -> None:
    """Refuse more ranks than devices.

    Raises:
        ConfigError: naming both numbers.
    """
    if visible is not None and visible < ranks:
        source = f"devices={devices!r}" if devices is not None else "this process"
        raise ConfigError(
            f"{ranks} ranks (tensor_parallel_size x ulysses_degree) need {ranks} devices, but "
            f"{source} shows {visible}; list more under devices or lower a degree"
        )
