"""One logger per module, prefixed with the rank in worker processes."""

import logging
import sys
from contextvars import ContextVar

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_PACKAGE = "vllm_omni"
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the current task works for, where it works for one."""


def get_logger(name: str) -> logging.Logger:
    """Logger of a module; handlers are installed only by :func:`configure_logging`."""
    return logging.getLogger(name)


def configure_logging(
    *, level: int = logging.INFO, rank: int | None = None, file: str | None = None
) -> None:
    """Send the package's log lines to stderr, and to a file, too. A later call replaces an earlier.

    Every process that we own calls it. Several may append to one file: each line is written at
    once and at the end.
    """
    prefix = "" if rank is None else f"[rank {rank}] "
    formatter = logging.Formatter(prefix + _FORMAT, datefmt="%m-%d %H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8", errors="backslashreplace"))
    package = logging.getLogger(_PACKAGE)
    for old in package.handlers:
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
    package.handlers[:] = handlers
    package.setLevel(level)
    package.propagate = False


def log_file() -> str | None:
    """File that this process logs to besides stderr, for the processes that it starts."""
    for handler in logging.getLogger(_PACKAGE).handlers:
        if isinstance(handler, logging.FileHandler):
            return handler.baseFilename
    return None


def adopt(name: str) -> None:
    """Send the lines of another library's logger, and of those below it, where ours go."""
    if logging.getLogger(_PACKAGE).handlers:
        library = logging.getLogger(name)
        library.handlers[:] = [_ToOurs()]
        library.propagate = False


class _ToOurs(logging.Handler):
    """Hands records to whatever handlers the package has at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(_PACKAGE).handlers:
            handler.handle(record)
