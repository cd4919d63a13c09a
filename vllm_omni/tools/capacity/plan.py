"""Plan how many GPUs, groups and pods a number of viewers takes. Nothing is loaded or measured.

The formulas are held to a simulation or to counted figures.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil, floor, inf

from vllm_omni.diffusion.geometry import chunk_play_ms
from vllm_omni.entrypoints.command_parser import integer, number
from vllm_omni.errors import ConfigError
from vllm_omni.tools.capacity.simulation import Crowd, Policy, Waits, simulate


def sessions_per_group(chunk_ms: float, fps: float) -> int:
    """Return how many worlds one worker group makes in time.

    They take turns, chunk by chunk, so this is a step function: a group whose chunk takes 0.75 of
    the time in which it is played makes one world, like a group that needs all of that time.
    """
    return floor(chunk_play_ms(fps) / chunk_ms + 1e-9)


def waiting_share(places: int, load: float) -> float:
    """Return the share of newcomers who find no free place: Erlang's formula C.

    Args:
        places: served at once by one line; must be above the load, else everybody waits.
        load: sessions that would run at once if there were places without end, on average
            (arrivals a second x mean stay).
    """
    if places <= load:
        return 1.0
    blocked = 1.0
    for place in range(1, places + 1):
        blocked = _with_one_more(blocked, place, load)
    return _waiting(blocked, places, load)


def places_for(load: float, target: float) -> int:
    """Return the fewest places behind one line at which at most a share ``target`` waits."""
    places, blocked, waiting = 0, 1.0, 1.0
    while waiting > target:
        places += 1
        blocked = _with_one_more(blocked, places, load)
        waiting = _waiting(blocked, places, load) if places > load else 1.0
    return places


def mean_wait_s(places: int, load: float, stay_s: float) -> float:
    """Return the mean wait of all newcomers in seconds, if nobody gives up waiting."""
    return waiting_share(places, load) * stay_s / (places - load)


def _with_one_more(blocked: float, places: int, load: float) -> float:
    """Erlang's formula B by its recursion: the share that is refused where nobody can wait."""
    return load * blocked / (places + load * blocked)


def _waiting(blocked: float, places: int, load: float) -> float:
    return blocked / (1.0 - (load / places) * (1.0 - blocked))


CHUNK_TFLOP = 1142.4
"""One steady chunk at 832x480, counted: ``python -m benchmarks.lingbot_world.roofline``."""
GPU_TFLOPS = {"h200": 760.0, "910b1": 290.0, "910c-die": 290.0, "rtx5090": 199.0, "l20": 100.0}
"""Best that real 16-bit matrix products reach, in TFLOP/s; the sources are in the roofline."""
GROUP_GB = 37.0
"""Weights in bfloat16 that a starting group reads."""
PROXY_CPU_MS = 0.7
"""CPU of HAProxy for a chunk of 1 MB, measured."""
MACHINES_A_CELL = 250
"""Nodes up to which Ray says that it is tested."""
GPU_HOURS_A_FAILURE = 50_700.0
"""Published for the training cluster of Llama 3."""


@dataclass(frozen=True, slots=True)
class Demands:
    """What a plan is asked for: the viewers, their hardware and their patience.

    Attributes:
        viewers: that watch at once, on average.
        gpu: one of :data:`GPU_TFLOPS`.
        ulysses: GPUs of one worker group.
        chunk_ms: time of one chunk on such a group, in milliseconds.
        fps: rate at which viewers play; a client that names none plays at 24.
        waiting_target: share of newcomers that may have to wait.
        stay_s: mean time that a viewer watches, in seconds.
        megabits: of video for one viewer, in Mbit/s.
        encode_ms: CPU of the API process for one chunk, in milliseconds.
        gpus_per_machine: GPUs that one API process may command.
        encoder_cores: cores that one API process may use for encoding.
        growth_share: share of the groups that is to start within ``growth_minutes``.
    """

    viewers: int
    gpu: str = "h200"
    ulysses: int = 4
    chunk_ms: float = 560.0
    fps: float = 16.0
    waiting_target: float = 0.05
    stay_s: float = 600.0
    megabits: float = 4.0
    encode_ms: float = 75.0
    gpus_per_machine: int = 8
    encoder_cores: float = 8.0
    growth_share: float = 0.1
    growth_minutes: float = 10.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "gpu" and not 0 < value < inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if self.gpu not in GPU_TFLOPS:
            raise ConfigError(f"--gpu must be one of {', '.join(GPU_TFLOPS)}, got {self.gpu}")
        if self.waiting_target >= 1:
            raise ConfigError(f"--waiting-target must be below 1, got {self.waiting_target:g}")
        if self.gpus_per_machine < self.ulysses:
            raise ConfigError(
                f"a group of {self.ulysses} GPUs does not fit into a machine of "
                f"{self.gpus_per_machine}; lower --ulysses or raise --gpus-per-machine"
            )
        if sessions_per_group(self.chunk_ms, self.fps) == 0:
            raise ConfigError(
                f"a chunk plays {chunk_play_ms(self.fps):.0f} ms at {self.fps:g} fps, but takes "
                f"{self.chunk_ms:g} ms to make: no world would be in real time; lower --chunk-ms "
                "(more GPUs a group) or --fps"
            )

    @property
    def chunk_bound_ms(self) -> float:
        """The least time of a chunk on a group at 16 bits: its matrix products alone."""
        return CHUNK_TFLOP / (GPU_TFLOPS[self.gpu] * self.ulysses) * 1000.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What it takes; each field is named with its unit."""

    chunk_play_ms: float
    chunk_bound_ms: float
    sessions_per_group: int
    places: int
    waiting_share: float
    mean_wait_s: float
    groups: int
    gpus: int
    gpus_per_viewer: float
    machines: int
    groups_per_pod: int
    pods: int
    cells: int
    arrivals_per_s: float
    chunks_per_s: float
    video_gbit_per_s: float
    proxy_cores: float
    h264_cores: float
    cold_start_gbyte_per_s: float
    cold_start_tbyte: float
    gpu_failures_per_hour: float
    notes: tuple[str, ...]


def make_plan(demands: Demands) -> Plan:
    """Compute a plan. Places are those of one line; a proxy by least connections comes close."""
    sessions = sessions_per_group(demands.chunk_ms, demands.fps)
    places = places_for(float(demands.viewers), demands.waiting_target)
    groups = ceil(places / sessions)
    gpus = groups * demands.ulysses
    machines = ceil(groups / (demands.gpus_per_machine // demands.ulysses))
    chunks_per_s = demands.viewers / (chunk_play_ms(demands.fps) / 1000.0)
    per_pod = _groups_per_pod(demands, sessions)
    started = groups * demands.growth_share
    return Plan(
        chunk_play_ms=chunk_play_ms(demands.fps),
        chunk_bound_ms=demands.chunk_bound_ms,
        sessions_per_group=sessions,
        places=places,
        waiting_share=waiting_share(places, float(demands.viewers)),
        mean_wait_s=mean_wait_s(places, float(demands.viewers), demands.stay_s),
        groups=groups,
        gpus=gpus,
        gpus_per_viewer=gpus / demands.viewers,
        machines=machines,
        groups_per_pod=per_pod,
        pods=ceil(groups / per_pod),
        cells=ceil(machines / MACHINES_A_CELL),
        arrivals_per_s=demands.viewers / demands.stay_s,
        chunks_per_s=chunks_per_s,
        video_gbit_per_s=demands.viewers * demands.megabits / 1000.0,
        proxy_cores=PROXY_CPU_MS / 1000.0 * chunks_per_s,
        h264_cores=demands.encode_ms / 1000.0 * chunks_per_s,
        cold_start_gbyte_per_s=started * GROUP_GB / (demands.growth_minutes * 60.0),
        cold_start_tbyte=started * GROUP_GB / 1000.0,
        gpu_failures_per_hour=gpus / GPU_HOURS_A_FAILURE,
        notes=tuple(_notes(demands, sessions)),
    )


def simulate_plan(demands: Demands, plan: Plan, policy: Policy, *, arrivals: int) -> Waits:
    """Let viewers come to the pods of a plan; a viewer gives up after two minutes of waiting."""
    crowd = Crowd(float(demands.viewers), stay_s=demands.stay_s, patience_s=120.0)
    places = ceil(plan.places / plan.pods)
    return simulate(crowd, pods=plan.pods, places=places, policy=policy, arrivals=arrivals)


def table(demands: Demands, plan: Plan) -> str:
    """The plan as lines for a terminal."""
    rows = [
        ("viewers", f"{demands.viewers} at once on average, each for {demands.stay_s:g} s"),
        ("a chunk plays", f"{plan.chunk_play_ms:.0f} ms at {demands.fps:g} fps"),
        (
            "a chunk takes",
            f"{demands.chunk_ms:g} ms on {demands.ulysses} x {demands.gpu}; its matrix products "
            f"alone, at 16 bits, {plan.chunk_bound_ms:.0f} ms",
        ),
        ("worlds in real time on a group", f"{plan.sessions_per_group}"),
        (
            "places",
            f"{plan.places}; {plan.waiting_share:.1%} of newcomers find none free, "
            f"the mean wait of all is {_figure(plan.mean_wait_s)} s",
        ),
        ("groups (replicas)", f"{plan.groups}"),
        ("GPUs", f"{plan.gpus}, {_figure(plan.gpus_per_viewer)} a viewer"),
        ("machines", f"{plan.machines} of {demands.gpus_per_machine} GPUs"),
        ("pods", f"{plan.pods} of {plan.groups_per_pod} groups at most"),
        ("cells", f"{plan.cells} of {MACHINES_A_CELL} machines at most"),
        ("arrivals", f"{_figure(plan.arrivals_per_s)} a second"),
        ("chunks of all viewers", f"{_figure(plan.chunks_per_s)} a second"),
        ("video", f"{_figure(plan.video_gbit_per_s)} Gbit/s"),
        ("proxy", f"{_figure(plan.proxy_cores)} cores"),
        ("H.264 of all viewers", f"{_figure(plan.h264_cores)} cores"),
        (
            f"cold start of {demands.growth_share:.0%} more in {demands.growth_minutes:g} min",
            f"{_figure(plan.cold_start_tbyte)} TB of weights, "
            f"{_figure(plan.cold_start_gbyte_per_s)} GB/s",
        ),
        ("lost GPUs", f"{_figure(plan.gpu_failures_per_hour)} an hour"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _figure(value: float) -> str:
    """Three digits that matter, and all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def waits_line(policy: Policy, waits: Waits) -> str:
    """What a simulation has shown, in one line."""
    return (
        f"simulated, {policy}: {waits.waiting:.1%} wait, {waits.gave_up:.1%} give up after 2 min, "
        f"99 of 100 within {waits.p99_s:.0f} s, {waits.in_use:.0%} of the places in use"
    )


def _groups_per_pod(demands: Demands, sessions: int) -> int:
    """As many groups as a machine has and the encoder of one API process carries."""
    in_machine = demands.gpus_per_machine // demands.ulysses
    cores_a_group = sessions * demands.encode_ms / chunk_play_ms(demands.fps)
    return max(1, min(in_machine, int(demands.encoder_cores / cores_a_group)))


def _notes(demands: Demands, sessions: int) -> Iterator[str]:
    if demands.chunk_ms < demands.chunk_bound_ms:
        yield (
            f"{demands.chunk_ms:g} ms is below {demands.chunk_bound_ms:.0f} ms, what the matrix "
            f"products of a chunk take on {demands.ulysses} x {demands.gpu} at 16 bits: it needs 8 "
            "bits or fewer operations"
        )
    next_ms = chunk_play_ms(demands.fps) / (sessions + 1)
    yield (
        f"a chunk of {next_ms:.0f} ms or less would make {sessions + 1} worlds a group; what lies "
        "between saves nothing"
    )
    in_haste = sessions_per_group(demands.chunk_ms, 24.0)
    if in_haste < sessions:
        yield (
            "clients that name no fps play at 24: a chunk then plays "
            f"{chunk_play_ms(24.0):.0f} ms; worlds in real time on a group: {in_haste}"
        )


_ARRIVALS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-omni plan`` to its parser."""
    for flag, kind, text in (
        ("--viewers", integer, "viewers who watch at once, on average"),
        ("--ulysses", integer, "GPUs of one worker group (4)"),
        ("--chunk-ms", number, "measured time of one chunk on such a group (560)"),
        (
            "--fps",
            number,
            "rate of playback (16: 750 ms a chunk; who names none plays at 24: 500 ms)",
        ),
        ("--waiting-target", number, "share of newcomers that may have to wait (0.05)"),
        ("--stay-s", number, "mean seconds that a viewer watches (600)"),
        ("--megabits", number, "Mbit/s of video for a viewer (4)"),
        ("--encode-ms", number, "CPU milliseconds of H.264 for a chunk (75)"),
        ("--gpus-per-machine", integer, "GPUs of one machine, and so of one server (8)"),
        ("--encoder-cores", number, "cores for the video of one server (8)"),
        ("--growth-share", number, "share of groups to start in --growth-minutes (0.1)"),
        ("--growth-minutes", number, "time for that (10)"),
    ):
        parser.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, help=text, required=flag == "--viewers"
        )
    parser.add_argument(
        "--gpu", choices=GPU_TFLOPS, default=argparse.SUPPRESS, help="kind of GPU (h200)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--simulate", action="store_true", help="let viewers come to the pods, by three policies"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan for what the command line asks, as a table or as JSON."""
    given = {name: value for name, value in vars(args).items() if name not in {"json", "simulate"}}
    demands = Demands(**given)
    plan = make_plan(demands)
    waits = {
        policy: simulate_plan(demands, plan, policy, arrivals=_ARRIVALS)
        for policy in (Policy if args.simulate else ())
    }
    if args.json:
        simulated = {policy.value: asdict(one) for policy, one in waits.items()}
        told = {"demands": asdict(demands), "plan": asdict(plan), "simulated": simulated}
        print(json.dumps(told, indent=2))
        return 0
    print(table(demands, plan))
    for policy, one in waits.items():
        print(waits_line(policy, one))
    return 0
