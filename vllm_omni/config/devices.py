"""Which devices the ranks may use, found out without loading a device library."""

from collections.abc import Mapping
from itertools import pairwise, takewhile
from types import MappingProxyType

from vllm_omni import envs
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.errors import ConfigError

_NAMES = ("GPU-", "MIG-")
"""How CUDA's own names of devices begin."""


def device_names(platform: str, devices: str | None, env: Mapping[str, str]) -> str | None:
    """Translate ``devices`` to the names that the device library understands.

    A number counts the entries of the operator's variable of visible devices, where there is one:
    with ``CUDA_VISIBLE_DEVICES=4,5``, ``devices="1"`` is GPU 5. UUIDs and names of MIG slices are
    names already.

    Args:
        env: variables of the workers, which stand over those of this process.

    Returns:
        The names, comma-separated; ``None`` where all visible devices may be used.

    Raises:
        ConfigError: if a number lies beyond the variable's list, or an NPU could not make out the
            names.
    """
    if platform not in envs.DEVICE_NODES or devices is None:
        return devices
    variable, allowed = envs.visible_devices(platform, env)
    names = [name.strip() for name in devices.split(",")]
    if allowed is not None:
        listed = _usable(allowed)
        beyond = [name for name in names if name.isdecimal() and int(name) >= len(listed)]
        if beyond:
            raise ConfigError(
                f"devices={devices!r} counts the {len(listed)} entries of {variable}={allowed!r} "
                f"from 0, which has no entry {', '.join(beyond)}; list other numbers under devices "
                f"or let {variable} show more"
            )
        names = [listed[int(name)] if name.isdecimal() else name for name in names]
    if platform == "npu":
        _check_rising(names)
    return ",".join(names)


def devices_of_replicas(devices: str | None, *, ranks: int, replicas: int) -> list[str]:
    """Share out devices among replicas, in the notation of ``devices``.

    Args:
        devices: those of all replicas; those of the first one, by numbers that follow each other,
            after which the others' follow; or ``None`` for all from 0 on.
        ranks: devices of one replica.
        replicas: number of replicas at most.

    Returns:
        The devices of each replica, comma-separated.

    Raises:
        ConfigError: if the list is neither the devices of all nor those of one.
    """
    names = [str(index) for index in range(ranks)] if devices is None else devices.split(",")
    if len(names) == ranks and all(name.isdecimal() for name in names):
        first = int(names[0])
        if names == [str(first + index) for index in range(ranks)]:
            names = [str(first + index) for index in range(ranks * replicas)]
    if len(names) != ranks * replicas:
        raise ConfigError(
            f"devices={devices!r} lists {len(names)} devices; {replicas} replicas of {ranks} ranks "
            f"need {ranks * replicas} of them, or the {ranks} of the first replica by numbers that "
            "follow each other"
        )
    return [",".join(names[start : start + ranks]) for start in range(0, len(names), ranks)]


def visible_device_count(
    platform: str, devices: str | None, env: Mapping[str, str] = MappingProxyType({})
) -> int | None:
    """Devices that the ranks may use; ``None`` where there is no limit or it cannot be told.

    A ``devices`` list stands over the operator's environment, that over the device nodes.
    """
    if platform not in envs.DEVICE_NODES:
        return None
    if devices is not None:
        return len(devices.split(","))
    _, allowed = envs.visible_devices(platform, env)
    if allowed is not None:
        return len(_usable(allowed))
    return len(list(envs.DEV.glob(envs.DEVICE_NODES[platform]))) or None


def _usable(allowed: str) -> list[str]:
    """The entries of a variable of visible devices, up to the first that names no device."""
    names = (name.strip() for name in allowed.split(","))
    return list(takewhile(lambda name: name.isdecimal() or name.startswith(_NAMES), names))


def _check_rising(names: list[str]) -> None:
    """CANN reads a list up to the first number that does not rise, and drops the rest silently."""
    rising = all(name.isdecimal() for name in names) and all(
        int(one) < int(next_one) for one, next_one in pairwise(names)
    )
    if not rising:
        raise ConfigError(
            f"devices of an NPU must be rising numbers such as '0,1,2,3', got {','.join(names)!r}"
        )


def refuse_missing_devices(devices: str) -> None:
    """Refuse a deployment that lists devices where the machine shows none.

    Raises:
        ConfigError: what was looked for, and the setting that asks for the CPU.
    """
    looked = ", ".join(
        f"{envs.DEV}/{pattern.split('[')[0]}*" for pattern in envs.DEVICE_NODES.values()
    )
    raise ConfigError(
        f"devices={devices!r} asks for GPUs or NPUs, but this machine shows none (looked for "
        f"{looked}); see to the driver, or set device: cpu (--device cpu) to run on the CPU, or "
        "cuda or npu where the devices have other names"
    )


def check_devices(config: OmniDiffusionConfig, visible: int | None) -> None:
    """Refuse more ranks than there are devices; those that no list names are the machine's.

    Args:
        visible: how many devices there are; ``None`` to find out.

    Raises:
        ConfigError: naming both numbers.
    """
    if config.device == "cpu" or config.executor == "ray":
        return
    ranks, replicas = config.parallel.world_size, config.replicas.most
    all_ranks, degrees = ranks * replicas, "tensor_parallel_size x ulysses_degree"
    if replicas > 1:
        degrees = f"{degrees} of each of {replicas} replicas"
    devices, first = config.devices, 0
    if devices is not None and replicas > 1:
        shares = devices_of_replicas(devices, ranks=ranks, replicas=replicas)
        if devices.count(",") + 1 < all_ranks:
            # Only those of the first replica are listed; the others' follow on the machine.
            devices, first = None, int(shares[0].split(",")[0])
    if visible is None:
        visible = visible_device_count(config.device, devices, config.env)
    if visible is not None and visible < first + all_ranks:
        source = f"devices={devices!r}" if devices is not None else "this process"
        beyond = f" from number {first} on" if first else ""
        raise ConfigError(
            f"{all_ranks} ranks ({degrees}) need {all_ranks} devices{beyond}, but "
            f"{source} shows {visible}; list more under devices or lower a degree"
        )
