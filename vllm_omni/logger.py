"""One logger per module, prefixed with the rank in worker processes."""

import logging
import sys
import time
from contextvars import ContextVar

from vllm_omni.system_errors import reason

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_PACKAGE = "vllm_omni"
_TELL_AGAIN_S = 60.0
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the current task works for, where it works for one."""


def get_logger(name: str) -> logging.Logger:
    """Logger of a module; handlers are installed only by :func:`configure_logging`."""
    return logging.getLogger(name)


init_logger = get_logger
"""The name that users of the public package import."""


class LogFile(logging.FileHandler):
    """A file for log lines. When it cannot be written, one line a minute on stderr says so.

    Attributes:
        failure: what the system said of the last line; ``None`` if that was written.
    """

    def __init__(self, file: str) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")
        self.failure: OSError | None = None
        self._told_s = -_TELL_AGAIN_S

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line and forget the failure of the line before."""
        self.failure = None
        super().emit(record)

    def close(self) -> None:
        """Close the file; what could not be written before cannot be now."""
        try:
            super().close()
        except OSError as error:
            self.failure = error

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        """Take note of a line that could not be written; other errors are told as usual."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.failure = error
        if time.monotonic() - self._told_s > _TELL_AGAIN_S:
            self._told_s = time.monotonic()
            print(f"log lines are lost: {self.baseFilename!r}: {reason(error)}", file=sys.stderr)


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
        handlers.append(LogFile(file))
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


def log_failure() -> OSError | None:
    """Return what the system said when the latest line should go to the file."""
    for handler in logging.getLogger(_PACKAGE).handlers:
        if isinstance(handler, LogFile):
            return handler.failure
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
