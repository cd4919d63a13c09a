"""How many replicas there are: rules for one more and for one less."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni.engine.roster import Demand
from vllm_omni.engine.supervisor import WorkerSupervisor


@dataclass(frozen=True, slots=True)
class Growth:
    """How an engine gets replicas beside its first one.

    Attributes:
        make_supervisor: makes the supervisor of the replica with a number.
        least: replicas from the start on, and when nobody is there.
        most: replicas at most.
        spare: free places that are kept for those who will come.
        idle_s: how long a replica is without sessions before it ends.
    """

    make_supervisor: Callable[[int], WorkerSupervisor]
    least: int
    most: int
    spare: int = 0
    idle_s: float = 600.0

    def needs_one_more(self, demand: Demand) -> bool:
        """Whether the replicas are too few, or the free places and those that are coming."""
        wanted = demand.waiting + self.spare
        coming = demand.free + demand.coming * demand.places_each
        too_few = wanted > coming or demand.alive < self.least
        return too_few and demand.alive < self.most

    def needs_one_less(self, demand: Demand) -> int | None:
        """Return the replica that may end, the one with the highest number; ``None`` for none."""
        if demand.waiting or demand.coming or demand.alive <= self.least:
            return None
        idle = [
            replica
            for replica, (places, idle_s) in demand.idle.items()
            if idle_s >= self.idle_s and demand.free - places >= self.spare
        ]
        return max(idle, default=None)
