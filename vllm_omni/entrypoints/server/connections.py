"""Connections that are open: how many at most, and which one makes room for the next.

A client that says nothing costs a descriptor and nothing else. Whoever owes the server something
(the rest of a request, the next request, the first message of a socket) is in line to be cut off,
the longest debtor first, as soon as somebody else needs the place.
"""

from __future__ import annotations

import resource
from asyncio import WriteTransport
from enum import Enum

from vllm_omni.logger import OnceAMinute, get_logger

logger = get_logger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted."""
_MOST_DESCRIPTORS = 65_536
"""More than any machine serves; some programs walk over all that they may have."""
_ACCEPTED_SHARE = 16
_MOST_ACCEPTED = 100


class Debt(Enum):
    """What the client of a connection owes the server."""

    REQUEST = "a request"
    BODY = "the rest of a body"
    START = "session.start"
    NOTHING = "nothing"


class OpenConnections:
    """All connections of a server. Used on its event loop.

    Args:
        limit: connections of any kind at the same time.

    Attributes:
        accepted_at_once: connections to take from the system before these are counted here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.accepted_at_once = max(min(limit // _ACCEPTED_SHARE, _MOST_ACCEPTED), 1)
        self._debts: dict[WriteTransport, Debt] = {}
        self._debtors: dict[WriteTransport, None] = {}
        self._cut_off = self._refused = 0
        self._tells = OnceAMinute()

    def __len__(self) -> int:
        return len(self._debts)

    def opened(self, connection: WriteTransport, debt: Debt) -> bool:
        """Take in a new connection, in the place of the longest debtor where all are taken.

        Returns:
            Whether there was a place.
        """
        if len(self._debts) >= self.limit and not self._cut_off_longest_debtor():
            self._refused += 1
            self._log()
            return False
        self._debts[connection] = Debt.NOTHING
        self.owes(connection, debt)
        return True

    def owes(self, connection: WriteTransport, debt: Debt) -> None:
        """Note what the client of a connection owes from here on; a new debt begins its time."""
        if self._debts.get(connection, debt) is debt:
            return
        self._debts[connection] = debt
        self._debtors.pop(connection, None)
        if debt is not Debt.NOTHING:
            self._debtors[connection] = None

    def closed(self, connection: WriteTransport) -> None:
        """Forget a connection; one that is not known is no error."""
        self._debts.pop(connection, None)
        self._debtors.pop(connection, None)

    def _cut_off_longest_debtor(self) -> bool:
        if not self._debtors:
            return False
        longest = next(iter(self._debtors))
        self.closed(longest)
        longest.abort()
        self._cut_off += 1
        self._log()
        return True

    def _log(self) -> None:
        """One line a minute, however many connections come."""
        if self._tells.is_due():
            logger.warning(
                "%d connections are open, which is the limit (half of the descriptors, ulimit -n): "
                "%d that owed a request were cut off, %d were refused since the start",
                *(self.limit, self._cut_off, self._refused),
            )


def raise_descriptor_limit() -> None:
    """Allow this process, and those it starts, all descriptors that the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """How many connections to serve: the other half of the descriptors is for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usable = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
    return max(usable // 2, 1)
