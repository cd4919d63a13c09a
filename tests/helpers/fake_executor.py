"""An executor without a model: chunks carry their plan, failures come where a test puts them."""

import threading
import time
from collections.abc import Callable

import numpy as np

from vllm_omni.diffusion.geometry import chunk_pixel_frames
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkResult,
    ChunkTimings,
    GroupCapacity,
    LiveCamera,
    SessionRequest,
    SourceImage,
    TokenizedPrompt,
)
from vllm_omni.errors import OutOfKVMemoryError, SessionClosedError, WorkerFailedError


def make_request(**changes: object) -> SessionRequest:
    """A live 64x96 session of three chunks."""
    fields = {
        "prompt": "a harbour",
        "image": SourceImage(rgb=np.zeros((8, 8, 3), np.uint8)),
        "height": 64,
        "width": 96,
        "num_chunks": 3,
        "seed": 1,
        "camera": LiveCamera(),
    }
    fields |= changes
    return SessionRequest(**fields | {"prompt": TokenizedPrompt(fields["prompt"])})


class FakeExecutor:
    """Counts what it is asked and holds no more sessions than it says.

    Attributes:
        num_pages: of its pool.
        plans: every plan that was run, in order.
        dead: what a rank has ended by, while nobody asked it anything.
        began_s: ``time.monotonic()`` at which each of them was begun.
        open_ids: sessions that are open now.
        failures: ``(session ordinal, chunk index) -> error`` to raise once, before the pixels.
        gate: while cleared, chunks wait before they are made.
        at_gate: set while one does.
        noise: pixels that do not compress, instead of flat ones.
    """

    def __init__(self, *, sessions: int = 1, chunk_s: float = 0.0, noise: bool = False) -> None:
        self.sessions = sessions
        self.num_pages = 4
        self.noise = noise
        self.chunk_s = chunk_s
        self.plans: list[ChunkPlan] = []
        self.began_s: list[float] = []
        self.open_ids: list[str] = []
        self.requests: dict[str, SessionRequest] = {}
        self.opened_total = 0
        self.closed_total = 0
        self.failures: dict[tuple[int, int], BaseException] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.started = 0
        self.shut_down = 0
        self.dead: WorkerFailedError | None = None
        self._ordinals: dict[str, int] = {}

    def start(self) -> GroupCapacity:
        self.started += 1
        return GroupCapacity(
            sessions=self.sessions,
            num_pages=self.num_pages,
            page_tokens=128,
            page_bytes=1024,
            window_frames=9,
        )

    def open_session(self, session_id: str, request: SessionRequest) -> None:
        self.close_session(session_id)
        if len(self.open_ids) >= self.sessions:
            raise OutOfKVMemoryError("no pages")
        self.open_ids.append(session_id)
        self.requests[session_id] = request
        self._ordinals[session_id] = self.opened_total
        self.opened_total += 1

    def run_chunk(self, plan: ChunkPlan, deliver: Callable[[ChunkResult], None]) -> ChunkTimings:
        if plan.session_id not in self.open_ids:
            raise SessionClosedError(plan.session_id)
        began_s = time.monotonic()
        if not self.gate.is_set():
            self.at_gate.set()
        assert self.gate.wait(60), "the test never opened the gate"
        self.at_gate.clear()
        time.sleep(self.chunk_s)
        self.plans.append(plan)
        self.began_s.append(began_s)
        key = (self._ordinals[plan.session_id], plan.chunk_index)
        if key in self.failures:
            self.open_ids.remove(plan.session_id)
            raise self.failures.pop(key)
        request = self.requests[plan.session_id]
        shape = (chunk_pixel_frames(plan.chunk_index), request.height, request.width, 3)
        if self.noise:
            data = np.random.default_rng(plan.chunk_index).integers(0, 256, shape, np.uint8)
        else:
            data = np.full(shape, plan.chunk_index % 256, np.uint8)
        deliver(ChunkResult(plan.session_id, plan.chunk_index, data, time.monotonic()))
        return ChunkTimings(probes_ms=1.0, commit_ms=0.5)

    def close_session(self, session_id: str) -> None:
        if session_id in self.open_ids:
            self.open_ids.remove(session_id)
            self.closed_total += 1

    def check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    def peak_bytes(self) -> int:
        return 4096

    def shutdown(self) -> None:
        self.shut_down += 1
        self.open_ids.clear()
