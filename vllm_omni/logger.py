"""One logger per module; lines as text or JSON, without secrets and without control characters."""

import base64
import json
import logging
import logging.config
import re
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from typing_extensions import override

from vllm_omni.system_errors import reason

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_PACKAGE = "vllm_omni"
_MINUTE_S = 60.0
_HIDDEN = "***"
_SHORTEST_SECRET = 4
"""A shorter one would be found in half of all words."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""All but tab and line feed, which lines of our own hold."""
_LOOKS_SECRET = re.compile(
    r"((?:\b(?:api[_-]?key|access[_-]?token|token|password|secret)=)|\bbearer[ .])[^\s&\"',;]+",
    re.IGNORECASE,
)
"""What stands where clients put keys, right or wrong ones, in a URL, a header or a subprotocol."""
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the current task works for, where it works for one."""


def get_logger(name: str) -> logging.Logger:
    """Logger of a module; handlers are installed only by :func:`configure_logging`."""
    return logging.getLogger(name)


init_logger = get_logger
"""The name that users of the public package import."""


class OnceAMinute:
    """Limits a line that could be due very often to one a minute."""

    def __init__(self) -> None:
        self._said_s = -_MINUTE_S

    def is_due(self) -> bool:
        """Tell whether to write the line, which then counts as written."""
        now_s = time.monotonic()
        if now_s - self._said_s < _MINUTE_S:
            return False
        self._said_s = now_s
        return True


class LogFile(logging.FileHandler):
    """A file for log lines. When it cannot be written, one line a minute on stderr says so.

    Attributes:
        failure: what the system said of the last line; ``None`` if that was written.
    """

    def __init__(self, file: str) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")
        self.failure: OSError | None = None
        self._tells = OnceAMinute()

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
        if self._tells.is_due():
            print(f"log lines are lost: {self.baseFilename!r}: {reason(error)}", file=sys.stderr)


class _TextFormatter(logging.Formatter):
    def __init__(self, prefix: str, secrets: tuple[str, ...]) -> None:
        super().__init__(prefix + _FORMAT, datefmt="%m-%d %H:%M:%S")
        self._secrets = secrets

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _visible(record.message)
        return super().formatMessage(record)

    @override
    def format(self, record: logging.LogRecord) -> str:
        return _without(self._secrets, super().format(record))


class _JsonFormatter(logging.Formatter):
    def __init__(self, rank: int | None, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._rank = rank
        self._secrets = secrets

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _without(self._secrets, record.getMessage()),
            "rank": self._rank,
            "request_id": request_id.get(),
        }
        if record.exc_info:
            line["exception"] = _without(self._secrets, self.formatException(record.exc_info))
        return json.dumps({name: value for name, value in line.items() if value is not None})


def _visible(text: str) -> str:
    """Write control characters as their escapes: a terminal obeys them."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _without(secrets: tuple[str, ...], text: str) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _LOOKS_SECRET.sub(rf"\1{_HIDDEN}", text)


def spellings_of(secrets: Iterable[str]) -> tuple[str, ...]:
    """Every way in which a log line could hold one of some secrets, the longest first."""
    found: set[str] = set()
    for secret in (one for one in secrets if len(one) >= _SHORTEST_SECRET):
        encoded = base64.urlsafe_b64encode(secret.encode()).decode().rstrip("=")
        found |= {secret, quote(secret, safe=""), encoded}
    return tuple(sorted(found, key=len, reverse=True))


def configure_logging(
    *,
    level: int = logging.INFO,
    rank: int | None = None,
    file: str | None = None,
    as_json: bool = False,
    secrets: tuple[str, ...] = (),
) -> None:
    """Send the package's log lines to stderr, and to a file, too. A later call replaces an earlier.

    Every process that we own calls it. Several may append to one file: each line is written at
    once and at the end.

    Args:
        as_json: whether each line is one JSON object.
        secrets: texts that no line may hold; see :func:`spellings_of`.
    """
    prefix = "" if rank is None else f"[rank {rank}] "
    formatter = _JsonFormatter(rank, secrets) if as_json else _TextFormatter(prefix, secrets)
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


def apply_log_config(file: str) -> None:
    """Apply a JSON file of ``logging.config.dictConfig`` over what :func:`configure_logging` did.

    Loggers that the file does not name stay as they are.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it does not configure a log.
    """
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it holds no object")  # noqa: TRY004
    try:
        logging.config.dictConfig({"disable_existing_loggers": False} | config)
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def logs_json() -> bool:
    """Whether this process logs JSON, for the processes that it starts."""
    handlers = logging.getLogger(_PACKAGE).handlers
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in handlers)


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
    """Send the lines of another library's logger, and of those below it, where ours go.

    One that goes somewhere already, as the operator said, is left alone.
    """
    library = logging.getLogger(name)
    if logging.getLogger(_PACKAGE).handlers and not library.handlers:
        library.handlers[:] = [_ToOurs()]
        library.propagate = False


class _ToOurs(logging.Handler):
    """Hands records to whatever handlers the package has at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(_PACKAGE).handlers:
            handler.handle(record)
