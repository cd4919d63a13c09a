"""What the operating system refuses, in one line for whoever runs the program."""

import errno
import os
from pathlib import Path

_ADVICE = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine has too many files open",
    errno.EAGAIN: "raise the limit of processes and threads (ulimit -u, or that of the container)",
    errno.ENOMEM: "the machine or the container has too little memory",
}
_NO_THREAD = "can't start new thread"
_THREAD_ADVICE = (
    "raise the limit of processes and threads (ulimit -u, or that of the container) or of memory "
    "(ulimit -v)"
)


def is_refusal(error: BaseException) -> bool:
    """Tell whether the system refused something: a file, memory, a process or a thread."""
    return isinstance(error, OSError | MemoryError) or (
        isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    )


def reason(error: BaseException) -> str:
    """Say in words what was refused, for an error that :func:`is_refusal` knows."""
    if isinstance(error, MemoryError):
        return f"out of memory; {_ADVICE[errno.ENOMEM]}"
    if not isinstance(error, OSError):
        return f"{error}; {_THREAD_ADVICE}"
    text = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0)
    return f"{text}; {advice}" if advice else text


def expand_home(path: str | Path) -> Path:
    """Replace the ``~`` or ``~name`` that a path begins with by that user's home.

    Raises:
        OSError: if nobody knows where that is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error), str(path)) from None


def refuse_special(path: Path) -> None:
    """Refuse a pipe, a socket or a device: reading one may wait, or go on, for ever.

    Raises:
        OSError: if it is one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device and no file", str(path))


def sentence(error: BaseException) -> str:
    """Say which file was refused and why, for an error that :func:`is_refusal` knows."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes):
        return reason(error)
    return f"{os.fsdecode(error.filename)!r}: {reason(error)}"
