"""Measure a running server as its viewers see it, over the WebSocket of live worlds."""

import argparse

from vllm_omni.benchmarks import realtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the benchmark, behind the word that vLLM's command of this name has there."""
    parser.add_argument("what", nargs="?", choices=["serve"], help="a running server, always")
    realtime.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 if a session failed."""
    return realtime.run(args)
