"""Private folders of a process; a later process can tell those that killed ones have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_NEW_S = 10.0
"""Time that a process has to lock the folder it has made."""


class OwnFolder:
    """A new folder that nobody else may read, below another one, locked while its maker lives.

    Args:
        prefix: what its name begins with.
        root: folder in which it is made.

    Raises:
        OSError: if the system refuses it.
    """

    def __init__(self, prefix: str, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove the folder with its files, where it still is; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_leftovers(prefix: str, root: Path) -> None:
    """Remove our user's folders that no process holds, but one that may be about to be held."""
    for folder in root.glob(f"{prefix}*"):
        try:
            lock = _locked(folder) if _may_be_left_over(folder) else None
        except OSError as error:
            logger.warning("a folder that was left over stays: %s", error)
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder, ``None`` where another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _may_be_left_over(folder: Path) -> bool:
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and time.time() - status.st_mtime > _NEW_S
