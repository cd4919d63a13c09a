"""Write a tiny checkpoint in the real layout. Its weights are random, so its pictures are noise."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-omni tiny-checkpoint`` to its parser."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="written complete or not")
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier tiny checkpoint in DIR"
    )


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say where; one that is there already stays."""
    from vllm_omni.tools.tiny_checkpoint import (  # loads torch
        is_tiny_checkpoint,
        write_tiny_checkpoint,
    )

    if not args.force and is_tiny_checkpoint(args.directory):
        print(f"{args.directory} is already there: this very checkpoint")
        return 0

    directory = write_tiny_checkpoint(args.directory, force=args.force)
    size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"wrote {directory} ({size_bytes / 1e6:.2f} MB, random weights: it paints noise)")
    return 0
