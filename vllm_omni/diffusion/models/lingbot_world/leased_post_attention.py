"""Replays what follows each block's attention as a captured graph, over two slots in turn.

One graph covers the attention's projection, the gated residual, the camera modulation and the
norm before the cross-attention. There are two slots of input buffers; blocks run one after
another, so all of them share these, and each block has a graph of its own for each slot.
Everything is captured for one size of video before the first session. Sessions of another size
run as if there were no graphs.

A lease is one use of a slot:

    OPEN --- mark_written, stage ---> WRITTEN --- finish ---> FINISHED --- end ---> CLOSED

Its producer writes the attention's output into the slot, then ``finish`` replays the graph; the
outputs may be read while the lease lasts. All of this happens on the stream that acquired the
lease. An output must not outlive its lease: a later one replays into the same memory.

After a failure inside a lease nothing is released, since the device may still work on it: every
later lease is refused and the worker has to be restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor
from typing_extensions import override

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.attention import (
    LayerContext,
    LayerWindow,
    Modulation,
    attend_heads,
)
from vllm_omni.diffusion.models.lingbot_world.blocks import (
    EAGER,
    LingBotWorldBlock,
    PostAttention,
)
from vllm_omni.diffusion.models.lingbot_world.lease_capture import (
    CapturedBlock,
    LeaseInputs,
    LeaseOutputs,
    LeaseSize,
    Slot,
)
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform
from vllm_omni.platforms.graphs import DeviceStream, GraphRuntime
from vllm_omni.platforms.quarantine import QUARANTINE, Quarantine

logger = get_logger(__name__)

NUM_SLOTS = 2


class LeaseError(RuntimeError):
    """A lease was used in a way that its rules forbid."""


class SlotsBusyError(LeaseError):
    """Both slots are leased; nothing was touched."""


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


class LeaseState(Enum):
    """Where a lease stands in the picture above."""

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
        for source, target in zip(inputs, self.slot.inputs, strict=True):
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


def configured_post_attention(
    config: OmniDiffusionConfig,
    platform: Platform,
    *,
    dim: int,
    parallel: ParallelState,
    device: torch.device,
) -> PostAttention:
    """Make the configured way from a block's attention to the end of its cross-attention.

    Raises:
        ConfigError: if the configuration does not go with graphs, before any weight is read.
    """
    if not config.leased_post_attention:
        return EAGER
    if not config.enforce_eager:
        raise ConfigError(
            "lingbot_npu_leased_post_attention captures what enforce_eager: false would compile; "
            "set enforce_eager to true"
        )
    if config.geometry is None:
        raise ConfigError(
            "lingbot_npu_leased_post_attention captures one size before the first session; set "
            "ar_diffusion_height and ar_diffusion_width"
        )
    tokens = LATENT_FRAMES_PER_CHUNK * config.geometry.tokens_per_frame // parallel.sequence.size
    return LeasedPostAttention(platform.graph_runtime(), LeaseSize(tokens, dim, device))


class LeasedPostAttention(PostAttention):
    """Replays graphs of all blocks of one transformer, on one rank.

    One forward at a time uses it; the lock guards nothing but the choice of a slot.

    Args:
        size: of the sessions that use the graphs.
        quarantine: takes what a failure leaves behind.
    """

    def __init__(
        self, runtime: GraphRuntime, size: LeaseSize, *, quarantine: Quarantine = QUARANTINE
    ) -> None:
        self.runtime = runtime
        self.size = size
        self.record = LeaseRecord()
        self.slots: tuple[Slot, ...] = ()
        self._quarantine = quarantine
        self._captured: Mapping[LingBotWorldBlock, CapturedBlock] = {}
        self._lock = threading.Lock()

    @override
    def prepare(self, blocks: Sequence[LingBotWorldBlock]) -> None:
        """Allocate the slots and capture every block over both.

        Raises:
            ConfigError: if a projection cannot be captured, or a capture fails.
        """
        self.slots = tuple(
            Slot.empty(index, self.size, self.runtime.new_pool()) for index in range(NUM_SLOTS)
        )
        self._captured = {
            block: CapturedBlock.of(block, index, self.slots, self.runtime)
            for index, block in enumerate(blocks)
        }
        self.record.captures = NUM_SLOTS * len(self._captured)
        logger.info(
            "captured %d post-attention graphs of %d tokens per rank with the %s runtime",
            self.record.captures,
            self.size.tokens,
            self.runtime.name,
        )

    @override
    def begin_session(self, tokens: int) -> None:
        """Refuse a session after a failure; log once that a size of session runs without graphs.

        Raises:
            WorkerFailedError: if a lease has failed.
        """
        self.record.check_healthy()
        if tokens != self.size.tokens:
            self.record.fallbacks += 1
            logger.info(
                "a session of %d tokens per rank runs without post-attention graphs: prepared are "
                "%d (ar_diffusion_height and ar_diffusion_width)",
                tokens,
                self.size.tokens,
            )

    @override
    def run(
        self,
        block: LingBotWorldBlock,
        modulated: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        feed_forward: Modulation,
        layer: LayerContext,
    ) -> Float[Tensor, "tokens dim"]:
        """Go on from a graph where there is one for this size.

        Raises:
            WorkerFailedError: if anything was raised inside the lease, or a block was changed.
        """
        if len(x) != self.size.tokens or self.runtime.is_capturing():
            return super().run(block, modulated, x, gate, feed_forward, layer)
        inputs = LeaseInputs(x, gate, layer.camera.gain, layer.camera.shift)
        try:
            with self.acquire(block, inputs) as lease:
                _attend_into(lease, block, modulated, layer.window)
                outputs = lease.finish()
                x = outputs.residual + block.cross_attn(outputs.normalised, layer.text)
        except Exception as error:
            if self.record.failed:
                raise WorkerFailedError(
                    f"a post-attention graph failed ({type(error).__name__}: {error}); its memory "
                    "is kept and all workers have to be restarted"
                ) from error
            raise
        return block.feed_forward(x, feed_forward)

    @contextmanager
    def acquire(self, block: LingBotWorldBlock, inputs: LeaseInputs) -> Iterator[Lease]:
        """Borrow a slot: inputs are copied in once the device is done with its last reader.

        Whatever is raised before the lease has ended passes on unchanged, and the slot is never
        given out again.

        Raises:
            WorkerFailedError: if a lease has failed, or the block was changed; nothing was touched.
            LeaseError: if no graphs were prepared for such inputs; nothing was touched.
            SlotsBusyError: if both slots are leased; nothing was touched.
        """
        lease = self._borrow(self._captured[block], inputs)
        try:
            lease.fill(inputs)
            yield lease
            lease.end()
        except BaseException as error:
            self.record.failed = True
            exchange = block.self_attn.parts.exchange
            captured = self._captured[block]
            owners = (self, block, captured, lease, lease.slot, inputs, exchange)
            self._quarantine.hold("leased post-attention", error, *owners)
            raise

    def _borrow(self, block: CapturedBlock, inputs: LeaseInputs) -> Lease:
        with self._lock:
            self.record.check_healthy()
            block.check_unchanged()
            if not inputs.fit(self.slots[0].inputs):
                shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
                raise LeaseError(f"no graphs were prepared for {shapes}, but for {self.size}")
            free = [slot for slot in self.slots if not slot.active]
            if not free:
                raise SlotsBusyError("both slots still have consumers")
            slot = min(free, key=lambda candidate: candidate.generation)
            slot.active = True
            slot.generation += 1
            return Lease(block, slot, runtime=self.runtime, record=self.record)


def _attend_into(
    lease: Lease,
    block: LingBotWorldBlock,
    modulated: Float[Tensor, "tokens dim"],
    window: LayerWindow,
) -> None:
    """Attend and leave the result, before its projection, in the lease's slot.

    Mutates the window's pages. An exchange between ranks writes into the slot by itself.
    """
    attention, parts = block.self_attn, block.self_attn.parts
    inputs = attention.queries_keys_values(modulated, window)
    attended = attend_heads(*inputs, window, parts)
    if parts.exchange.group.size == 1:
        lease.stage(attended.flatten(1))
        return
    heads = lease.projection_input.unflatten(-1, (-1, parts.config.attention_head_dim))
    parts.exchange.heads_to_tokens_into(attended, heads, latent_frames=LATENT_FRAMES_PER_CHUNK)
    lease.mark_written()
