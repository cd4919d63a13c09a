"""Counts what a rank sends to its peers: calls, bytes, and the time that the host spent on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class TrafficKind:
    """Exchanges of one kind.

    Attributes:
        sent_bytes: bytes that left this rank; what it keeps for itself does not count.
        host_ms: time inside the calls. A device that queues work returns before it is done.
    """

    calls: int = 0
    sent_bytes: int = 0
    host_ms: float = 0.0

    @contextmanager
    def counted(self, sent_bytes: int) -> Iterator[None]:
        """Count one exchange and time it."""
        started = time.perf_counter()
        yield
        self.host_ms += (time.perf_counter() - started) * 1000.0
        self.calls += 1
        self.sent_bytes += sent_bytes


@dataclass(slots=True)
class ExchangeTraffic:
    """Exchanges of the transformer's tokens on one rank, since it was started.

    Attributes:
        heads: queries, keys and values, tokens to heads.
        tokens: attention outputs, heads to tokens.
        gather: outputs of the head.
    """

    heads: TrafficKind = field(default_factory=TrafficKind)
    tokens: TrafficKind = field(default_factory=TrafficKind)
    gather: TrafficKind = field(default_factory=TrafficKind)

    @property
    def total(self) -> TrafficKind:
        """All kinds together."""
        kinds = (self.heads, self.tokens, self.gather)
        return TrafficKind(
            calls=sum(kind.calls for kind in kinds),
            sent_bytes=sum(kind.sent_bytes for kind in kinds),
            host_ms=sum(kind.host_ms for kind in kinds),
        )
