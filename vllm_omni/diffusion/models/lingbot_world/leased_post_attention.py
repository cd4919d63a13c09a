"""Replays what follows each block's attention as a captured graph, over two slots in turn.

One graph covers the attention's projection, the gated residual, the camera modulation and the
norm before the cross-attention. There are two slots of input buffers; blocks run one after
another, so all of them share these, and each block has a graph of its own for each slot.
Everything is captured for one size of video before the first session. Sessions of another size
run as if there were no graphs.

After a failure inside a lease nothing is released, since the device may still work on it: every
later lease is refused and the worker has to be restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.attention import (
    EAGER,
    AttendingBlock,
    LayerContext,
    LayerWindow,
    Modulation,
    PostAttention,
    attend_heads,
)
from vllm_omni.diffusion.models.lingbot_world.lease import (
    Lease,
    LeaseError,
    LeaseInputs,
    LeaseRecord,
    LeaseSize,
    Slot,
    SlotsBusyError,
)
from vllm_omni.diffusion.models.lingbot_world.lease_capture import CapturedBlock
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.logger import get_logger
from vllm_omni.platforms import Platform
from vllm_omni.platforms.graphs import GraphRuntime
from vllm_omni.platforms.quarantine import QUARANTINE, Quarantine

logger = get_logger(__name__)

NUM_SLOTS = 2


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


class LeasedPostAttention:
    """A :class:`PostAttention` that replays graphs of all blocks of one transformer, on one rank.

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
        self._captured: Mapping[AttendingBlock, CapturedBlock] = {}
        self._lock = threading.Lock()

    def prepare(self, blocks: Sequence[AttendingBlock]) -> None:
        """Allocate the slots and capture every block over both.

        Raises:
            ConfigError: if a projection cannot be captured, or a capture fails.
        """
        self.slots = tuple(
            Slot.empty(index, self.size, self.runtime.new_pool()) for index in range(NUM_SLOTS)
        )
        memory = [(slot.buffers, slot.pool) for slot in self.slots]
        self._captured = {
            block: CapturedBlock.of(block, index, memory, self.runtime)
            for index, block in enumerate(blocks)
        }
        self.record.captures = NUM_SLOTS * len(self._captured)
        logger.info(
            "captured %d post-attention graphs of %d tokens per rank with the %s runtime",
            self.record.captures,
            self.size.tokens,
            self.runtime.name,
        )

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

    def run(
        self,
        block: AttendingBlock,
        modulated: Float[Tensor, "tokens dim"],
        x: Float[Tensor, "tokens dim"],
        gate: Float32[Tensor, "rows dim"],
        feed_forward: Modulation,
        layer: LayerContext,
    ) -> Float[Tensor, "tokens dim"]:
        """Return the residual stream after the block.

        Raises:
            WorkerFailedError: if anything was raised inside the lease, or a block was changed.
        """
        if len(x) != self.size.tokens or self.runtime.is_capturing():
            return EAGER.run(block, modulated, x, gate, feed_forward, layer)
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
    def acquire(self, block: AttendingBlock, inputs: LeaseInputs) -> Iterator[Lease]:
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
                shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs.tensors]
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
    block: AttendingBlock,
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
