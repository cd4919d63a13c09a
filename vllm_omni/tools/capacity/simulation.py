"""Viewers who come, wait, watch and leave, on pods of places; event by event, without models."""

import heapq
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log
from random import Random

_ARRIVAL, _END, _LOST_PATIENCE = range(3)


class Policy(StrEnum):
    """How a newcomer gets a pod; each pod has a line of its own."""

    LEAST = "least connections"
    ROUND_ROBIN = "round robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who comes to watch, for how long and with how much patience.

    Attributes:
        viewers: that would watch at once if nobody had to wait, on average.
        stay_s: mean time that a viewer watches.
        spread: standard deviation of the stay's logarithm; 0 takes exponential stays.
        patience_s: how long a viewer waits for a place.
    """

    viewers: float
    stay_s: float = 600.0
    spread: float = 1.0
    patience_s: float = inf

    def stay(self, random: Random) -> float:
        """Draw how long a viewer watches, in seconds."""
        if not self.spread:
            return random.expovariate(1.0 / self.stay_s)
        return random.lognormvariate(log(self.stay_s) - self.spread**2 / 2, self.spread)

    def rest_of_stay(self, random: Random) -> float:
        """Draw how long somebody who is met watching goes on to watch: long stays are met more."""
        if not self.spread:
            return random.expovariate(1.0 / self.stay_s)
        whole = random.lognormvariate(log(self.stay_s) + self.spread**2 / 2, self.spread)
        return whole * random.random()


@dataclass(frozen=True, slots=True)
class Waits:
    """How long newcomers had to wait, and how many gave up.

    Attributes:
        waiting: share that found no free place on their pod.
        gave_up: share that left without having watched.
        p99_s: 99th percentile of the wait of those who watched.
        mean_s: their mean wait.
        in_use: places in use, on average, as a share of all.
    """

    waiting: float
    gave_up: float
    p99_s: float
    mean_s: float
    in_use: float


class _Pod:
    def __init__(self, places: int) -> None:
        self.places = places
        self.watching = 0
        self.line: deque[int] = deque()


class _Run:
    def __init__(self, crowd: Crowd, pods: list[_Pod], policy: Policy, random: Random) -> None:
        self.crowd, self.pods, self.policy, self.random = crowd, pods, policy, random
        self.events: list[tuple[float, int, int, int]] = []
        self.waiting: dict[int, float] = {}
        self.waits_s: list[float] = []
        self.waited = self.gave_up = self.number = 0
        self.watching = 0
        self.watched_s = 0.0

    def choose(self) -> int:
        if self.policy is Policy.RANDOM:
            return self.random.randrange(len(self.pods))
        if self.policy is Policy.ROUND_ROBIN:
            return self.number % len(self.pods)
        load = [pod.watching + len(pod.line) for pod in self.pods]
        return load.index(min(load))

    def begin(self, now_s: float, pod: int, stay_s: float) -> None:
        self.pods[pod].watching += 1
        self.watching += 1
        heapq.heappush(self.events, (now_s + stay_s, _END, pod, 0))

    def arrive(self, now_s: float) -> None:
        self.number += 1
        index = self.choose()
        pod = self.pods[index]
        if pod.watching < pod.places:
            self.waits_s.append(0.0)
            self.begin(now_s, index, self.crowd.stay(self.random))
            return
        self.waited += 1
        pod.line.append(self.number)
        self.waiting[self.number] = now_s
        if self.crowd.patience_s < inf:
            leaves_s = now_s + self.crowd.patience_s
            heapq.heappush(self.events, (leaves_s, _LOST_PATIENCE, index, self.number))

    def end(self, now_s: float, index: int) -> None:
        pod = self.pods[index]
        pod.watching -= 1
        self.watching -= 1
        if pod.line:
            viewer = pod.line.popleft()
            self.waits_s.append(now_s - self.waiting.pop(viewer))
            self.begin(now_s, index, self.crowd.stay(self.random))

    def lose_patience(self, index: int, viewer: int) -> None:
        if self.waiting.pop(viewer, None) is not None:
            self.pods[index].line.remove(viewer)
            self.gave_up += 1

    def run(self, arrivals: int) -> None:
        rate = self.crowd.viewers / self.crowd.stay_s
        heapq.heappush(self.events, (self.random.expovariate(rate), _ARRIVAL, 0, 0))
        last_s = 0.0
        while self.number < arrivals:
            now_s, kind, pod, viewer = heapq.heappop(self.events)
            self.watched_s += (now_s - last_s) * self.watching
            last_s = now_s
            if kind == _ARRIVAL:
                self.arrive(now_s)
                next_s = now_s + self.random.expovariate(rate)
                heapq.heappush(self.events, (next_s, _ARRIVAL, 0, 0))
            elif kind == _END:
                self.end(now_s, pod)
            else:
                self.lose_patience(pod, viewer)
        self.watched_s /= last_s * sum(one.places for one in self.pods)


def simulate(
    crowd: Crowd,
    *,
    pods: int,
    places: int,
    policy: Policy = Policy.LEAST,
    arrivals: int = 20_000,
    seed: int = 0,
) -> Waits:
    """Let viewers come to pods that are as full as the crowd makes them from the start.

    Args:
        pods: number of lines.
        places: of each pod.
        arrivals: number of viewers to follow.
        seed: of everything that is drawn.
    """
    run = _Run(crowd, [_Pod(places) for _ in range(pods)], policy, Random(seed))
    for watcher in range(min(round(crowd.viewers), pods * places)):
        run.begin(0.0, watcher % pods, crowd.rest_of_stay(run.random))
    run.run(arrivals)
    waits_s = sorted(run.waits_s)
    return Waits(
        waiting=run.waited / run.number,
        gave_up=run.gave_up / run.number,
        p99_s=waits_s[int(0.99 * (len(waits_s) - 1))],
        mean_s=sum(waits_s) / len(waits_s),
        in_use=run.watched_s,
    )
