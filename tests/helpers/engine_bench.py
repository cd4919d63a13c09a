"""An engine on fake workers, and clients that read its events."""

import queue
import time
from collections.abc import Callable

from tests.helpers.fake_executor import FakeExecutor, make_request
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import ChunkReady, Ended, EngineSession, SessionEvent, SessionOptions
from vllm_omni.engine.supervisor import WorkerSupervisor


class Bench:
    """An engine with fake workers and a client that reads events."""

    def __init__(self, *executors: FakeExecutor, max_queued: int = 4, start: bool = True) -> None:
        self.executors = list(executors) or [FakeExecutor()]
        self._next = iter(self.executors)
        supervisor = WorkerSupervisor(lambda: next(self._next), warm_up=None, sleep=lambda _: None)
        self.engine = Engine(lambda _: supervisor, EngineMetrics("m"), max_queued=max_queued)
        if start:
            self.engine.start()

    def open(
        self,
        *,
        options: SessionOptions | None = None,
        request_id: str | None = None,
        **changes: object,
    ) -> "Reader":
        """Put a session in line."""
        events: queue.SimpleQueue[SessionEvent] = queue.SimpleQueue()
        session_id = self.engine.open(
            make_request(**changes), events.put, options, request_id=request_id
        )
        return Reader(self.engine, session_id, events)

    def metric(self, name: str, **labels: str) -> float | None:
        """A sample by its name without the prefix."""
        registry = self.engine.metrics.registry
        return registry.get_sample_value(f"vllm_omni:{name}", {"model_name": "m"} | labels)

    def counted(self) -> dict[str, float]:
        """How sessions ended, by reason; those that happened."""
        found = {
            reason: self.metric("requests_success_total", finished_reason=reason)
            for reason in ("finished", "stopped")
        } | {
            reason: self.metric("requests_failed_total", reason=reason)
            for reason in ("client_abort", "client_disconnect", "stage_error", "unknown")
        }
        assert None not in found.values(), "a rate needs a zero to start from"
        return {reason: count for reason, count in found.items() if count}


class Reader:
    """The client's side of one session."""

    def __init__(self, engine: Engine, session_id: str, events: queue.SimpleQueue) -> None:
        self.engine = engine
        self.session_id = session_id
        self.events = events

    def next(self) -> SessionEvent:
        """The next event; a chunk is taken."""
        event = self.events.get(timeout=10)
        if isinstance(event, ChunkReady):
            self.engine.delivered(self.session_id)
        return event

    def until(self, kind: type) -> SessionEvent:
        """Skip to an event."""
        while not isinstance(event := self.next(), kind):
            pass
        return event

    def rest(self) -> list[SessionEvent]:
        """Everything to the end."""
        events = [self.next()]
        while not isinstance(events[-1], Ended):
            events.append(self.next())
        return events


def make_session(
    name: str,
    *,
    now_s: float = 0.0,
    fps: float = 12.0,
    lead_ms: float | None = None,
    live: bool = False,
    **changes: object,
) -> EngineSession:
    """A session that no engine knows, with a clock of the test's own."""
    events: list[SessionEvent] = []
    return EngineSession(
        name,
        make_request(fps=fps, num_chunks=None, **changes),
        events.append,
        options=SessionOptions(max_lead_ms=lead_ms, live=live),
        now_s=now_s,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that the engine's thread brings about."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def chunk_indices(events: list[SessionEvent]) -> list[int]:
    """Chunks of the rollout among the events."""
    return [event.result.chunk_index for event in events if isinstance(event, ChunkReady)]
