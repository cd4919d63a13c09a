"""What an executor and its worker processes say to each other. No torch."""

from dataclasses import dataclass

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic
from vllm_omni.diffusion.messages import ChunkPlan, ChunkTimings, GroupCapacity, SessionRequest
from vllm_omni.errors import OmniError


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker process is started with.

    Attributes:
        rank: index of the process in its group; 0 is the root.
        rendezvous: where the ranks of this generation find each other, a directory that no
            earlier generation used; ``None`` for a group of one.
        log_level: of the process that starts it.
        log_file: that process's, to which the worker appends; ``None`` for none.
    """

    config: OmniDiffusionConfig
    rank: int
    rendezvous: str | None
    log_level: int
    log_file: str | None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open a session."""

    session_id: str
    request: SessionRequest


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Make one chunk."""

    plan: ChunkPlan


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Free a session."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ReportPeak:
    """Say the peak of memory."""


@dataclass(frozen=True, slots=True)
class ReportTraffic:
    """Say what was exchanged between the ranks that share tokens."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Free everything and end the process."""


Command = OpenSession | RunChunk | CloseSession | ReportPeak | ReportTraffic | Stop


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The chunk's data stand in the shared memory; the commit follows.

    Attributes:
        dtype: as ``numpy.dtype.str``.
        ready_s: ``time.monotonic()`` of the worker when the data were on the host.
    """

    session_id: str
    chunk_index: int
    dtype: str
    shape: tuple[int, ...]
    ready_s: float
    timings: ChunkTimings


@dataclass(frozen=True, slots=True)
class Done:
    """The command was carried out."""

    value: GroupCapacity | ChunkTimings | ExchangeTraffic | int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The command was not carried out; the worker goes on.

    Attributes:
        error: ``None`` where another rank refused and this one went along.
    """

    error: OmniError | None


@dataclass(frozen=True, slots=True)
class Lost:
    """A step that all ranks had begun raised on this one; the process ends.

    Attributes:
        reason: class and text of what was raised.
    """

    reason: str


Reply = ChunkReady | Done | Refused | Lost
