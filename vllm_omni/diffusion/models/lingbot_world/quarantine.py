"""Holds for ever what device work may still touch after a failure, until the process is ended."""

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Held:
    """What one failure left behind.

    Attributes:
        origin: the part that failed.
        reason: the exception, as text.
        owners: never released.
    """

    origin: str
    reason: str
    owners: tuple[object, ...]


@dataclass(slots=True)
class Quarantine:
    """A list that only grows. It swallows nothing and ends no process."""

    held: list[Held] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, origin: str, reason: BaseException, owners: tuple[object, ...]) -> None:
        """Keep ``owners``."""
        with self._lock:
            self.held.append(Held(origin, f"{type(reason).__name__}: {reason}", owners))


PROCESS_QUARANTINE = Quarantine()
"""Of this process."""
