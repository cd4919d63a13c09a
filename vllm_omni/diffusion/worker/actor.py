"""One rank as a Ray actor: its conversation with the executor goes by Ray's calls and objects.

Only executor/ray_actors.py imports this module, and Ray where the actor runs. It loads no torch by
itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import ray
from jaxtyping import Shaped

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.worker.process import (
    Command,
    Reply,
    SharedChunk,
    WorkerMain,
    WorkerTask,
    prepare_environment,
)

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""

Said = tuple[Reply, np.ndarray | None]
"""A reply, and the pixels that it announces."""


@dataclass(frozen=True, slots=True)
class Berth:
    """Where Ray has put a rank.

    Attributes:
        node: Ray's id of the machine.
        address: of the machine.
        interface: network interface that has this address, ``None`` where none is found.
        store: where the ranks meet, ``tcp://HOST:PORT``; of rank 0 of several alone.
    """

    node: str
    address: str
    process_id: int
    interface: str | None
    store: str | None


class RankActor:
    """One rank; the model has a thread of its own, beside those that Ray calls the actor in."""

    def __init__(self) -> None:
        self._calls = _Calls()
        self._store: object = None

    def settle(self, rank: int, config: OmniDiffusionConfig) -> Berth:
        """Say where this rank is; rank 0 of several keeps the store where they meet from now on."""
        address = ray.util.get_node_ip_address()
        interface = _interface_of(address)
        store = None
        if config.parallel.world_size > 1:
            prepare_environment(config, interface)
            # On every rank, so that all load torch at the same time.
            from torch._C._distributed_c10d import TCPStore

            if rank == 0:
                # Kept: the group that is made later finds it by its port in this process.
                self._store = kept = TCPStore(
                    address, 0, is_master=True, wait_for_workers=False, multi_tenant=True
                )
                store = f"tcp://{address}:{kept.port}"
        node = ray.get_runtime_context().get_node_id()
        return Berth(node, address, os.getpid(), interface, store)

    def serve(self, task: WorkerTask, worker_main: WorkerMain) -> Iterator[Said]:
        """Run the rank; gives its replies until it ends."""

        def run() -> None:
            try:
                worker_main(task, self._calls, self._calls)
            finally:
                self._calls.said.put(None)

        threading.Thread(target=run, name="model", daemon=True).start()
        while (said := self._calls.said.get()) is not None:
            yield said

    def tell(self, command: Command) -> None:
        """Give the rank a command."""
        self._calls.told.put(command)


class _Calls:
    """Stands for the pipe and the shared memory of a worker process."""

    def __init__(self) -> None:
        self.told: SimpleQueue[Command] = SimpleQueue()
        self.said: SimpleQueue[Said | None] = SimpleQueue()
        self._pixels: np.ndarray | None = None

    def recv(self) -> Command:
        return self.told.get()

    def send(self, reply: Reply, /) -> None:
        self.said.put((reply, self._pixels if isinstance(reply, SharedChunk) else None))

    def write(self, array: Shaped[np.ndarray, "..."]) -> int:
        self._pixels = array
        return 0


def _interface_of(address: str) -> str | None:
    """Name of the interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
