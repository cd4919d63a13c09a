"""Where finished videos lie: one private folder of each server, below the operator's."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

from vllm_omni import envs
from vllm_omni.entrypoints.server.http_errors import HttpRefusalError
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger
from vllm_omni.own_folder import OwnFolder, remove_leftovers
from vllm_omni.system_errors import reason

logger = get_logger(__name__)

_PREFIX = "vllm-omni-videos-"
_PROBE_BYTES = 4096


class VideoStore:
    """The files of one server. The folder exists from the first use to :meth:`close`.

    A folder that somebody removes is made anew.
    """

    def __init__(self) -> None:
        self._folder: OwnFolder | None = None
        self._changing = threading.Lock()

    @property
    def place(self) -> str:
        """Where the folder is made, and the setting that decides it."""
        return f"{str(_root())!r} ({envs.storage_path.name})"

    @classmethod
    def try_out(cls) -> None:
        """Make a folder and remove it, with those that servers have left which were killed.

        Raises:
            ConfigError: naming the folder, the setting and the reason.
        """
        store = cls()
        try:
            store._probe()
        except OSError as error:
            raise ConfigError(
                f"finished videos cannot be stored in {store.place}: {reason(error)}"
            ) from None
        finally:
            store.close()
        remove_leftovers(_PREFIX, _root())

    def require_room(self, num_bytes: int) -> None:
        """Refuse a video before it is made, if it could not be stored.

        Args:
            num_bytes: about how large its file will be.

        Raises:
            HttpRefusalError: 503 if nothing can be written, or the disk has too little room.
        """
        try:
            free = self._probe()
        except OSError as error:
            raise self._refusal("no video can be stored", error) from None
        if free < num_bytes:
            raise HttpRefusalError(
                503,
                f"no video can be stored: it needs about {num_bytes} bytes, the storage of this "
                f"server has {free}",
            )

    def put(self, name: str, content: bytes) -> Path:
        """Write a file that appears under its name only when it is complete.

        Raises:
            HttpRefusalError: 503 with the reason, if the system refuses it.
        """
        try:
            path = self._own_folder() / name
            part = path.with_suffix(".part")
            try:
                part.write_bytes(content)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            what = f"the finished video of {len(content)} bytes is lost: it cannot be stored"
            raise self._refusal(what, error) from None
        return path

    def close(self) -> None:
        """Remove the folder and all files; a second call does nothing."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _probe(self) -> int:
        """Write a few bytes; returns how many more there is room for."""
        folder = self._own_folder()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
        return shutil.disk_usage(folder).free

    def _own_folder(self) -> Path:
        """A folder of our own: nobody else can have put a link where we write."""
        with self._changing:
            if self._folder is None or not self._folder.path.is_dir():
                self.close()
                root = _root()
                root.mkdir(parents=True, exist_ok=True)
                self._folder = OwnFolder(_PREFIX, root)
            return self._folder.path

    def _refusal(self, what: str, error: OSError) -> HttpRefusalError:
        # Clients learn the reason and the setting; the log the folder as well.
        logger.error("%s in %s: %s", what, self.place, reason(error))
        return HttpRefusalError(503, f"{what}: {reason(error)} (storage, {envs.storage_path.name})")


def _root() -> Path:
    named = envs.storage_path()
    return Path(tempfile.gettempdir() if named is None else named)
