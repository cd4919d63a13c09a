"""Runs a worker group as Ray actors, one per rank, on one machine or several.

Ray finds the machines, starts the processes, carries commands and pixels, and tells who died. What
ranks exchange goes through ``torch.distributed``. Ray restarts nothing: a group lives and dies as a
whole, and the supervisor makes the next one. Imported only where Ray is chosen; loads no torch.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from jaxtyping import Shaped
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.conversation import RankConversation
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.worker.actor import Berth, RankActor, Said
from vllm_omni.diffusion.worker.process import (
    Command,
    Reply,
    Seat,
    WorkerMain,
    WorkerTask,
)
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.logger import get_logger, logs_json

logger = get_logger(__name__)

_DEVICES: Mapping[str, dict[str, float]] = {"cpu": {}, "cuda": {"GPU": 1}, "npu": {"NPU": 1}}
_LOOK_S = 0.5
"""How often a wait looks whether the group was killed: Ray's head, which tells, may be lost."""
_ANSWER_S = 10.0
"""How long the head of a cluster may take to answer; Ray itself asks for a quarter of an hour."""
_NODE_LABEL = "ray.io/node-id"


class RayExecutor(MultiprocExecutor):
    """One generation of worker actors; all but the group is that of the processes."""

    def _make_group(self) -> RankConversation:
        connect(self._config.ray.address)
        return WorkerActors(self._config)


def connect(address: str) -> None:
    """Join this process to a Ray cluster unless it has joined one.

    Raises:
        ConfigError: if there is none at this address.
    """
    if ray.is_initialized():
        return
    before = signal.getsignal(signal.SIGTERM)
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        # Lines of JSON would not be lines of JSON with the name of a rank before them.
        ray.init(address=address, configure_logging=False, log_to_driver=not logs_json())
    except (OSError, OverflowError, RuntimeError, ValueError, AuthenticationError) as error:
        raise ConfigError(
            f"no Ray cluster at ray_address {address!r} that this machine is part of "
            f"({_words(error)}); start one here with `ray start`, and give this process the "
            "cluster's token if it has one (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class WorkerActors(RankConversation):
    """One actor per rank in a placement group.

    All that a rank says comes by one stream, which fails or ends as the rank does; it is put into
    the rank's inbox as it comes, whoever is listened to.
    """

    def __init__(self, config: OmniDiffusionConfig) -> None:
        super().__init__(config.parallel.world_size)
        self._config = replace(config, devices=None)
        self._places: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._streams: list[ray.ObjectRefGenerator] = []
        self._inbox: list[deque[Said]] = [deque() for _ in range(self.world_size)]
        self._endings: dict[int, str] = {}
        self._pixels: np.ndarray | None = None
        self.berths: list[Berth] = []

    @override
    def launch(self, worker_main: WorkerMain) -> None:
        with self._conversation():
            self._place_ranks()
            self._streams = [
                actor.serve.options(num_returns="streaming").remote(self._task(rank), worker_main)
                for rank, actor in enumerate(self._actors)
            ]
            self._is_launched = True

    def _place_ranks(self) -> None:
        deadline_s = time.monotonic() + self._config.stage_init_timeout_s
        needs = {"CPU": 1.0} | _DEVICES[self._config.device] | dict(self._config.ray.resources)
        for bundle in self._find_room(needs, deadline_s):
            self._actors.append(self._actor(needs, bundle))
        settling = [
            actor.settle.remote(rank, self._config) for rank, actor in enumerate(self._actors)
        ]
        while len(ray.wait(settling, num_returns=len(settling), timeout=_LOOK_S)[0]) < len(
            settling
        ):
            self._check_launch(deadline_s, "start")
        try:
            self.berths = ray.get(settling)
        except RayError as error:
            raise WorkerFailedError(f"Ray did not start the ranks: {_words(error)}") from None
        for rank, berth in enumerate(self.berths):
            logger.info("rank %d: process %d on %s", rank, berth.process_id, berth.address)
        if self.berths[0].node != ray.get_runtime_context().get_node_id():
            logger.warning(
                "rank 0 is on %s and not on this machine: every chunk's pixels cross the network",
                self.berths[0].address,
            )

    def _find_room(self, needs: dict[str, float], deadline_s: float) -> list[int]:
        """Reserve the resources of all ranks; gives the bundle of each, neighbours side by side."""
        here = ray.get_runtime_context().get_node_id()
        anywhere: list[dict[str, str]] = [{} for _ in range(self.world_size)]
        if self._root_belongs(here, needs):
            anywhere[0] = {_NODE_LABEL: here}
        self._places = places = placement_group(
            [needs] * self.world_size,
            strategy=self._config.ray.placement.upper(),
            bundle_label_selector=anywhere,
        )
        while not places.wait(_LOOK_S):
            self._check_launch(deadline_s, f"find {self.world_size} times {needs} free in")
        nodes = placement_group_table(places)["bundles_to_node_id"]
        return sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))

    def _root_belongs(self, here: str, needs: dict[str, float]) -> bool:
        """Whether to have rank 0 on this machine: not if that tears the group apart."""
        if self._config.replicas.most > 1:
            return False  # The groups beside this one may fill the machine.

        def room(node: dict[str, Any]) -> int:
            total = node["Resources"]
            return min(int(total.get(name, 0) // amount) for name, amount in needs.items())

        rooms = {node["NodeID"]: room(node) for node in ray.nodes() if node["Alive"]}
        if self._config.ray.placement == "spread":
            return rooms[here] > 0
        fits_whole = {node for node, count in rooms.items() if count >= self.world_size}
        return here in fits_whole if fits_whole else rooms[here] > 0

    def _check_launch(self, deadline_s: float, doing: str) -> None:
        if self._is_ended:
            raise WorkerFailedError(f"the worker group of {self.world_size} was ended")
        if time.monotonic() >= deadline_s:
            raise WorkerFailedError(
                f"the ranks did not {doing} the Ray cluster within "
                f"{self._config.stage_init_timeout_s:g} s (stage_init_timeout); see `ray status`"
            )

    def _actor(self, needs: Mapping[str, float], bundle: int) -> Any:  # noqa: ANN401 Ray makes it
        others = {name: amount for name, amount in needs.items() if name not in {"CPU", "GPU"}}
        env = dict(self._config.env)
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                resources=others,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=2,  # what it says, and what it is told
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._places, bundle),
                runtime_env={"env_vars": env} if env else None,
            )
            .remote()
        )

    def _task(self, rank: int) -> WorkerTask:
        nodes, berth = [berth.node for berth in self.berths], self.berths[rank]
        return WorkerTask(
            config=self._config,
            rank=rank,
            rendezvous=self.berths[0].store,
            log_level=logger.getEffectiveLevel(),
            log_file=None,
            logs_json=logs_json(),
            # Ray shows each rank its own device alone.
            seat=Seat(0, num_neighbours=nodes.count(berth.node), interface=berth.interface),
        )

    def _send(self, rank: int, command: Command) -> None:
        if rank in self._endings:
            raise BrokenPipeError
        self._actors[rank].tell.remote(command)

    def _speaker(self, ranks: Sequence[int], deadline_s: float) -> int | None:
        while True:
            speaker = next((rank for rank in ranks if self._inbox[rank]), None)
            if speaker is not None or self._endings or self._is_ended:
                return speaker
            if not self._listen(deadline_s):
                raise TimeoutError

    def _listen(self, deadline_s: float) -> bool:
        """Take in what a rank has said, or look up from waiting; False once the time is over."""
        left_s = deadline_s - time.monotonic()
        open_streams = {
            rank: stream for rank, stream in enumerate(self._streams) if rank not in self._endings
        }
        ready, _ = ray.wait(
            list(open_streams.values()), num_returns=1, timeout=min(max(left_s, 0.0), _LOOK_S)
        )
        for rank, stream in open_streams.items():
            if stream in ready:
                try:
                    self._inbox[rank].append(ray.get(next(stream)))
                except StopIteration:
                    self._endings[rank] = "ended"
                except RayError as error:
                    self._endings[rank] = f"on {self.berths[rank].address} ended ({_words(error)})"
        return bool(ready) or left_s > 0

    def _receive(self, rank: int) -> Reply:
        reply, pixels = self._inbox[rank].popleft()
        if pixels is not None:
            self._pixels = pixels
        return reply

    def _unread(self, rank: int) -> Iterator[Reply]:
        while self._inbox[rank]:
            yield self._inbox[rank].popleft()[0]

    def _await_ends(self, *, deadline_s: float, enough: int) -> bool:
        while len(self._endings) < enough:
            if not self._listen(deadline_s):
                return False
        return True

    def _ending(self, rank: int) -> str | None:
        return self._endings.get(rank)

    @override
    def read_pixels(
        self, slot: int, shape: tuple[int, ...], dtype: str
    ) -> Shaped[np.ndarray, "..."]:
        del slot  # There is one array at a time.
        with self._conversation():
            pixels, self._pixels = self._pixels, None
            assert pixels is not None, "pixels come with their announcement"
            assert (pixels.shape, pixels.dtype.str) == (shape, dtype)
            return pixels.copy()  # The object store gets its memory back, the caller may write.

    def _kill_ranks(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)

    def _close(self) -> None:
        self._kill_ranks()  # Those that were made meanwhile, too.
        if self._places is not None and ray.is_initialized():
            # Their devices are free only when they have ended.
            self._await_ends(deadline_s=time.monotonic() + 10 * _LOOK_S, enough=len(self._streams))
            with suppress(RayError):  # With its head lost, the cluster has nobody to tell.
                remove_placement_group(self._places)


def _words(error: Exception) -> str:
    """The first sentence of the line that says what happened."""
    return str(error).strip().splitlines()[-1].strip().partition(". ")[0]
