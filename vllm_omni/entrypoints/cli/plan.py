"""Plan how many GPUs, groups and pods a number of viewers takes. Nothing is loaded or measured."""

import argparse
import json

from vllm_omni.entrypoints.command_parser import integer, number
from vllm_omni.tools.capacity.plan import (
    GPU_TFLOPS,
    Demands,
    as_json,
    make_plan,
    simulate_plan,
    table,
    waits_line,
)
from vllm_omni.tools.capacity.simulation import Policy

_ARRIVALS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-omni plan`` to its parser."""
    for flag, kind, text in (
        ("--viewers", integer, "viewers who watch at once, on average"),
        ("--ulysses", integer, "GPUs of one worker group (4)"),
        ("--chunk-ms", number, "measured time of one chunk on such a group (560)"),
        ("--fps", number, "rate at which viewers play (16; clients that name none play at 24)"),
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
    """Print the plan for what the command line asks, as a table or as JSON.

    Raises:
        ConfigError: for values that no plan can be made with.
    """
    given = {name: value for name, value in vars(args).items() if name not in {"json", "simulate"}}
    demands = Demands(**given)
    plan = make_plan(demands)
    waits = {
        policy: simulate_plan(demands, plan, policy, arrivals=_ARRIVALS)
        for policy in (Policy if args.simulate else ())
    }
    if args.json:
        print(json.dumps(as_json(demands, plan, waits), indent=2))
        return 0
    print(table(demands, plan))
    for policy, one in waits.items():
        print(waits_line(policy, one))
    return 0
