"""One logger per module, prefixed with the rank in worker processes."""

import logging
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Logger of a module; handlers are installed only by :func:`configure_logging`."""
    return logging.getLogger(name)


def configure_logging(*, level: int = logging.INFO, rank: int | None = None) -> None:
    """Send the package's log lines to stderr. Called once by each process that we own."""
    prefix = "" if rank is None else f"[rank {rank}] "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%m-%d %H:%M:%S"))
    package = logging.getLogger("vllm_omni")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False
