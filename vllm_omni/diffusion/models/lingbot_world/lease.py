"""One use of a post-attention graph: what may be done with it, and in which order.

    OPEN --- mark_written, stage ---> WRITTEN --- finish ---> FINISHED --- end ---> CLOSED

A lease borrows one of two slots. Its producer writes the attention's output into the slot, then
``finish`` replays the graph; the outputs may be read while the lease lasts. All of this happens on
the stream that acquired the lease. An output must not outlive its lease: a later one replays into
the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor

from vllm_omni.diffusion.models.lingbot_world.lease_capture import CapturedBlock
from vllm_omni.errors import WorkerFailedError
from vllm_omni.platforms.graphs import DeviceEvent, DeviceStream, GraphPool, GraphRuntime


class LeaseError(RuntimeError):
    """A lease was used in a way that its rules forbid."""


class SlotsBusyError(LeaseError):
    """Both slots are leased; nothing was touched."""


@dataclass(frozen=True, slots=True)
class LeaseSize:
    """Shapes and place of the tensors of one size of video.

    Attributes:
        tokens: of a chunk on this rank.
        dim: channels of a token.
        gate_rows: one row of the gate for all tokens, or one for each latent frame.
    """

    tokens: int
    dim: int
    device: torch.device
    gate_rows: int = 1


@dataclass(frozen=True, slots=True)
class LeaseInputs:
    """What a block knows before its attention.

    Attributes:
        hidden: input of the block.
        gate: of the attention's output.
        gain: one plus the camera scale of each token.
        shift: camera shift of each token.
    """

    hidden: BFloat16[Tensor, "tokens dim"]
    gate: Float32[Tensor, "rows dim"]
    gain: BFloat16[Tensor, "tokens dim"]
    shift: BFloat16[Tensor, "tokens dim"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all four, in the order of the captured function's arguments."""
        return (self.hidden, self.gate, self.gain, self.shift)

    def fit(self, other: LeaseInputs) -> bool:
        """Tell whether each tensor has the shape, dtype and device of the other's."""
        return all(
            mine.shape == theirs.shape
            and mine.dtype == theirs.dtype
            and mine.device == theirs.device
            for mine, theirs in zip(self.tensors, other.tensors, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LeaseOutputs:
    """Outputs of the graph, borrowed from its memory.

    Attributes:
        projected: output of the attention's projection.
        residual: the block's stream after gate and camera.
        normalised: input of the cross-attention.
    """

    projected: BFloat16[Tensor, "tokens dim"]
    residual: BFloat16[Tensor, "tokens dim"]
    normalised: BFloat16[Tensor, "tokens dim"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all three, in the order of the captured function's results."""
        return (self.projected, self.residual, self.normalised)


@dataclass(slots=True)
class LeaseRecord:
    """What has happened to the leases of this rank so far.

    Attributes:
        fallbacks: sessions that run without graphs.
        failed: whether something was raised inside a lease; no lease is given out any more.
    """

    captures: int = 0
    replays: int = 0
    producer_writes: int = 0
    projection_copy_bytes: int = 0
    conditioning_copy_bytes: int = 0
    slot_reuse_waits: int = 0
    fallbacks: int = 0
    failed: bool = False

    def check_healthy(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            WorkerFailedError: asking for a restart.
        """
        if self.failed:
            raise WorkerFailedError(
                "an earlier post-attention graph failed on this rank; restart all workers"
            )


@dataclass(slots=True)
class Slot:
    """Input buffers that all blocks share; each block has captured a graph over them.

    The graphs of a slot share a pool. That is safe since a slot has one lease at a time, whose
    replay waits for the reader of the lease before it.

    Attributes:
        index: which of the two it is.
        attended: the attention's output before its projection.
        inputs: private copies of the block's inputs.
        pool: memory of the graphs.
        completion: end of the last reader's work; the next use waits for it.
        active: whether it is leased; after a failure it stays so.
        generation: number of leases so far.
    """

    index: int
    attended: BFloat16[Tensor, "tokens dim"]
    inputs: LeaseInputs
    pool: GraphPool
    completion: DeviceEvent | None = None
    active: bool = False
    generation: int = 0

    @classmethod
    def empty(cls, index: int, size: LeaseSize, pool: GraphPool) -> Slot:
        """Make zeroed buffers, so that a first run over them meets ordinary numbers."""
        shape, device = (size.tokens, size.dim), size.device
        attended, hidden, gain, shift = (
            torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(4)
        )
        gate = torch.zeros(size.gate_rows, size.dim, device=device)
        return cls(index, attended, LeaseInputs(hidden, gate, gain, shift), pool)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the arguments of the captured function."""
        return (self.attended, *self.inputs.tensors)


class LeaseState(Enum):
    """Where a lease stands in the picture at the top of this file."""

    OPEN = "open"
    WRITTEN = "written"
    FINISHED = "finished"
    CLOSED = "closed"


class Lease:
    """One block's use of a slot, made by :class:`LeasedPostAttention`."""

    def __init__(
        self, block: CapturedBlock, slot: Slot, *, runtime: GraphRuntime, record: LeaseRecord
    ) -> None:
        self.slot = slot
        self.stream: DeviceStream = runtime.current_stream(slot.attended.device)
        self.state = LeaseState.OPEN
        self._block = block
        self._runtime = runtime
        self._record = record
        self._generation = slot.generation

    def fill(self, inputs: LeaseInputs) -> None:
        """Copy a block's inputs into the slot, once its last reader is done on the device."""
        if self.slot.completion is not None:
            self._runtime.wait_event(self.stream, self.slot.completion)
            self.slot.completion = None
            self._record.slot_reuse_waits += 1
        for source, target in zip(inputs.tensors, self.slot.inputs.tensors, strict=True):
            self._runtime.record_owner(source, self.stream)
            self._runtime.record_owner(target, self.stream)
            target.copy_(source)
            self._record.conditioning_copy_bytes += target.nbytes
        self._runtime.record_owner(self.slot.attended, self.stream)

    @property
    def projection_input(self) -> BFloat16[Tensor, "tokens dim"]:
        """Return the buffer for the attention's output, to be written before :meth:`finish`."""
        self._check_alive()
        if self.state is LeaseState.FINISHED:
            raise LeaseError("the projection input was asked for after its graph was replayed")
        return self.slot.attended

    def mark_written(self) -> None:
        """Declare the projection input complete on the lease's stream; allowed once."""
        self._check_alive()
        self._check_stream()
        if self.state is not LeaseState.OPEN:
            raise LeaseError(
                f"the projection input was declared written, but is {self.state.value}"
            )
        self.state = LeaseState.WRITTEN
        self._record.producer_writes += 1

    def stage(self, value: BFloat16[Tensor, "tokens dim"]) -> None:
        """Copy a ready attention output into the slot, for a producer that cannot write there."""
        target = self.projection_input
        if value.shape != target.shape or value.device != target.device:
            raise LeaseError(
                f"the slot takes {tuple(target.shape)} on {target.device}, got "
                f"{tuple(value.shape)} on {value.device}"
            )
        self._runtime.record_owner(value, self.stream)
        target.copy_(value)
        self._record.projection_copy_bytes += value.nbytes
        self.mark_written()

    def finish(self) -> LeaseOutputs:
        """Replay the graph; later work of the lease's stream sees its outputs."""
        self._check_alive()
        self._check_stream()
        if self.state is not LeaseState.WRITTEN:
            raise LeaseError(
                f"a graph is replayed once, over a written input, got {self.state.value}"
            )
        self._block.check_unchanged()
        capture = self._block.captures[self.slot.index]
        capture.graph.replay()
        self._record.replays += 1
        self.state = LeaseState.FINISHED
        for output in capture.outputs:
            self._runtime.record_owner(output, self.stream)
        return LeaseOutputs(*capture.outputs)

    def end(self) -> None:
        """Close the lease and mark the end of its work for the next use of the slot."""
        self._record.check_healthy()
        if self.state is not LeaseState.FINISHED:
            raise LeaseError(f"a lease ended without graph submission, while {self.state.value}")
        self._check_stream()
        self.slot.completion = self._runtime.record_event(self.stream)
        self.slot.active = False
        self.state = LeaseState.CLOSED

    def _check_alive(self) -> None:
        self._record.check_healthy()
        current = self.slot.active and self.slot.generation == self._generation
        if self.state is LeaseState.CLOSED or not current:
            raise LeaseError("a lease was used outside its consumer lifetime")

    def _check_stream(self) -> None:
        if self._runtime.current_stream(self.slot.attended.device) != self.stream:
            raise LeaseError("a lease is written, replayed and read on the stream that acquired it")
