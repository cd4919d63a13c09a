"""One use of a post-attention graph: what may be done with it, and in which order.

    OPEN --- mark_written, stage ---> WRITTEN --- finish ---> FINISHED --- end ---> CLOSED

A lease borrows one of two slots. Its producer writes the attention's output into the slot, then
``finish`` replays the graph; consumers read the graph's outputs while the lease lasts. An output
must not outlive its lease: a later one replays into the same memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor

from vllm_omni.platforms.graphs import (
    Capture,
    DeviceEvent,
    DeviceStream,
    GraphPool,
    GraphRuntime,
)

_INPUT_DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]


class LeaseError(RuntimeError):
    """A lease was used in a way that its rules forbid."""


class SlotsBusyError(LeaseError):
    """Both slots are leased; nothing was touched."""


@dataclass(frozen=True, slots=True)
class LeaseSignature:
    """Shapes and place of the tensors of one size of video.

    Attributes:
        tokens: of a chunk on this rank.
        gate_rows: one row of the gate for all tokens, or one for each latent frame.
    """

    tokens: int
    dim: int
    gate_rows: int
    device: torch.device

    @property
    def is_sound(self) -> bool:
        """Whether the gate's rows share the tokens evenly."""
        return self.tokens > 0 and self.gate_rows > 0 and self.tokens % self.gate_rows == 0


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
        """In the order of the captured function's arguments."""
        return (self.hidden, self.gate, self.gain, self.shift)

    @property
    def signature(self) -> LeaseSignature:
        """Shapes and place.

        Raises:
            LeaseError: if the tensors do not belong together, or have other dtypes.
        """
        tokens, dim = self.hidden.shape
        token_shapes = {tensor.shape for tensor in (self.hidden, self.gain, self.shift)}
        dtypes = [tensor.dtype for tensor in self.tensors]
        devices = {tensor.device for tensor in self.tensors}
        alike = len(token_shapes) == len(devices) == 1
        if not alike or dtypes != _INPUT_DTYPES:
            raise LeaseError(
                f"hidden state, gate, gain and shift do not go together: {token_shapes}, "
                f"{dtypes}, {devices}"
            )
        return LeaseSignature(tokens, dim, self.gate.shape[0], self.hidden.device)


@dataclass(frozen=True, slots=True)
class PostAttention:
    """Outputs of the graph, borrowed from the slot.

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
        """In the order of the captured function's results."""
        return (self.projected, self.residual, self.normalised)


@dataclass(slots=True)
class LeaseCounters:
    """What happened so far."""

    captures: int = 0
    replays: int = 0
    producer_writes: int = 0
    projection_copy_bytes: int = 0
    conditioning_copy_bytes: int = 0
    output_clone_bytes: int = 0
    consumer_fences: int = 0
    slot_reuse_waits: int = 0
    fallbacks: int = 0


@dataclass(slots=True)
class Slot:
    """Input buffers, shared by the blocks, and what each block captured over them.

    The graphs of a slot share a pool. That is safe since a slot has one lease at a time, whose
    replay waits for every reader of the lease before it.

    Attributes:
        attended: the attention's output before its projection.
        inputs: private copies of the block's inputs.
        pool: memory of the graphs.
        captures: one graph for each block.
        completion: ends of the last consumers; the next use waits for them.
        active: whether it is leased, for ever after a failure.
        generation: number of leases so far.
    """

    attended: BFloat16[Tensor, "tokens dim"]
    inputs: LeaseInputs
    pool: GraphPool
    captures: list[Capture] = field(default_factory=list)
    completion: list[DeviceEvent] = field(default_factory=list)
    active: bool = False
    generation: int = 0

    @classmethod
    def empty(cls, signature: LeaseSignature, pool: GraphPool) -> Slot:
        """Zeroed buffers, so that a first run over them meets ordinary numbers."""
        size, device = (signature.tokens, signature.dim), signature.device
        attended, hidden, gain, shift = (
            torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(4)
        )
        gate = torch.zeros(signature.gate_rows, signature.dim, device=device)
        return cls(attended, LeaseInputs(hidden, gate, gain, shift), pool)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Arguments of the captured function."""
        return (self.attended, *self.inputs.tensors)

    def outputs(self, layer: int) -> PostAttention:
        """Outputs of a block's graph."""
        return PostAttention(*self.captures[layer].outputs)


class LeaseState(Enum):
    """See the module's picture."""

    OPEN = "open"
    WRITTEN = "written"
    FINISHED = "finished"
    CLOSED = "closed"


@runtime_checkable
class LeaseOwner(Protocol):
    """What a lease asks of the controller that gave it out."""

    runtime: GraphRuntime
    counters: LeaseCounters

    def check_healthy(self) -> None:
        """Raise if the controller has failed."""
        ...

    def check_unchanged(self, layer: int) -> None:
        """Raise if what the block's graph computes is not what was captured."""
        ...


class Lease:
    """One forward's use of a slot. Made by the controller, for the thread that asked."""

    def __init__(self, owner: LeaseOwner, layer: int, slot: Slot, stream: DeviceStream) -> None:
        self.layer = layer
        self.slot = slot
        self.stream = stream
        self.state = LeaseState.OPEN
        self.consumers: list[DeviceStream] = [stream]
        self._owner = owner
        self._generation = slot.generation
        self._ready: DeviceEvent | None = None

    @property
    def projection_input(self) -> BFloat16[Tensor, "tokens dim"]:
        """The buffer for the attention's output, until :meth:`finish`."""
        self._check_alive()
        if self.state is LeaseState.FINISHED:
            raise LeaseError("the projection input was asked for after its graph was replayed")
        return self.slot.attended

    def mark_written(self) -> None:
        """Say that the projection input is complete on the lease's stream; once."""
        self._check_alive()
        self._check_stream()
        if self.state is not LeaseState.OPEN:
            raise LeaseError(
                f"the projection input was declared written, but is {self.state.value}"
            )
        self.state = LeaseState.WRITTEN
        self._owner.counters.producer_writes += 1

    def stage(self, value: BFloat16[Tensor, "tokens dim"]) -> None:
        """Copy a ready attention output into the slot, for a producer that cannot write there."""
        target = self.projection_input
        if value.shape != target.shape or value.device != target.device:
            raise LeaseError(
                f"the slot takes {tuple(target.shape)} on {target.device}, got "
                f"{tuple(value.shape)} on {value.device}"
            )
        self._owner.runtime.record_owner(value, self.stream)
        target.copy_(value)
        self._owner.counters.projection_copy_bytes += value.nbytes
        self.mark_written()

    def finish(self) -> PostAttention:
        """Replay the graph; later work of the lease's stream sees its outputs."""
        self._check_alive()
        self._check_stream()
        if self.state is not LeaseState.WRITTEN:
            raise LeaseError(
                f"a graph is replayed once, over a written input, got {self.state.value}"
            )
        self._owner.check_unchanged(self.layer)
        self.slot.captures[self.layer].graph.replay()
        self._owner.counters.replays += 1
        self.state = LeaseState.FINISHED
        outputs = self.slot.outputs(self.layer)
        for output in outputs.tensors:
            self._owner.runtime.record_owner(output, self.stream)
        self._ready = self._owner.runtime.record_event(self.stream)
        return outputs

    def consume(self, stream: DeviceStream | None = None) -> PostAttention:
        """Outputs for work on ``stream`` (the current one if not given), which first waits."""
        self._check_alive()
        if self.state is not LeaseState.FINISHED or self._ready is None:
            raise LeaseError(f"there are no outputs before the replay, got {self.state.value}")
        runtime, outputs = self._owner.runtime, self.slot.outputs(self.layer)
        reader = stream or runtime.current_stream(self.slot.attended.device)
        if reader not in self.consumers:
            runtime.wait_event(reader, self._ready)
            self.consumers.append(reader)
            for output in outputs.tensors:
                runtime.record_owner(output, reader)
            self._owner.counters.consumer_fences += 1
        return outputs

    def end(self) -> None:
        """Close the lease and record the end of every consumer's work, in joining order."""
        if self.state is not LeaseState.FINISHED:
            raise LeaseError(f"a lease ended without graph submission, while {self.state.value}")
        runtime = self._owner.runtime
        self.slot.completion = [runtime.record_event(stream) for stream in self.consumers]
        self.state = LeaseState.CLOSED

    def _check_alive(self) -> None:
        self._owner.check_healthy()
        current = self.slot.active and self.slot.generation == self._generation
        if self.state is LeaseState.CLOSED or not current:
            raise LeaseError("a lease was used outside its consumer lifetime")

    def _check_stream(self) -> None:
        if self._owner.runtime.current_stream(self.slot.attended.device) != self.stream:
            raise LeaseError("a lease is written and replayed on the stream that acquired it")


@runtime_checkable
class LayerLeases(Protocol):
    """The leases of one block."""

    def acquire(self, inputs: LeaseInputs) -> AbstractContextManager[Lease]:
        """Borrow a slot for the time of the context."""
        ...
