"""Replays what follows each block's attention as a captured graph, over two slots in turn.

One graph covers the attention's projection, the gated residual, the camera modulation and the
norm before the cross-attention. The controller owns two slots of input buffers for each prepared
size; blocks run one after another, so all of them share these, and each block has a graph of its
own for each slot. Everything is captured before the first session. Whether a session uses the
graphs is decided once, when it opens.

After a failure inside a lease nothing is released, since the device may still work on it: the
controller refuses every later lease and the worker has to be restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from vllm_omni.diffusion.layers.linear import PlainLinearMethod, RowParallelLinear
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.diffusion.models.lingbot_world.lease import (
    Lease,
    LeaseCounters,
    LeaseError,
    LeaseInputs,
    LeaseSignature,
    PostAttention,
    Slot,
    SlotsBusyError,
)
from vllm_omni.diffusion.models.lingbot_world.lease_fingerprint import Fingerprint, fingerprint
from vllm_omni.diffusion.models.lingbot_world.quarantine import PROCESS_QUARANTINE
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.logger import get_logger
from vllm_omni.platforms.graphs import Capture, GraphRuntime

logger = get_logger(__name__)

MAX_SIGNATURES = 4
"""Sizes that can be prepared; they are never given up."""
NUM_SLOTS = 2
_ORIGIN = "leased post-attention"

Reporter = Callable[[str, BaseException, tuple[object, ...]], None]
"""Takes the origin, the reason and the owners of a failure, once."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How a controller is set up.

    Attributes:
        max_signatures: sizes that can be prepared.
        provider_owners: further objects that device work hangs on, such as exchange buffers.
        report: where failures go.
    """

    max_signatures: int = MAX_SIGNATURES
    provider_owners: tuple[object, ...] = ()
    report: Reporter = field(default=PROCESS_QUARANTINE.hold)

    def __post_init__(self) -> None:
        if isinstance(self.max_signatures, bool) or self.max_signatures < 1:
            raise ConfigError(f"max_signatures must be at least 1, got {self.max_signatures!r}")


class LeasedPostAttention:
    """The graphs of all blocks of one transformer on one rank.

    One forward at a time uses it; the lock guards nothing but the choice of a slot.

    Raises:
        ConfigError: if a block's projection cannot be captured.
    """

    def __init__(
        self,
        blocks: Sequence[LingBotWorldBlock],
        runtime: GraphRuntime,
        options: LeaseOptions | None = None,
    ) -> None:
        for block in blocks:
            _check_block(block)
        self.blocks = tuple(blocks)
        self.runtime = runtime
        self.options = options or LeaseOptions()
        self.counters = LeaseCounters()
        self.failed = False
        self.quarantine: list[tuple[object, ...]] = []
        self._arenas: dict[LeaseSignature, tuple[Slot, ...]] = {}
        self._fingerprints = tuple(fingerprint(block) for block in blocks)
        self._lock = threading.RLock()

    # ------------------------------------------------------------ before sessions

    def prepare(self, signature: LeaseSignature) -> None:
        """Allocate the slots of a size and capture every block over both.

        Raises:
            ConfigError: if no more sizes fit, or a graph could not be captured.
        """
        if signature in self._arenas:
            return
        if len(self._arenas) >= self.options.max_signatures or not signature.is_sound:
            raise ConfigError(
                f"post-attention graphs take {self.options.max_signatures} sizes whose gate rows "
                f"divide the tokens, got {signature} beside {len(self._arenas)} sizes"
            )
        slots = tuple(Slot.empty(signature, self.runtime.new_pool()) for _ in range(NUM_SLOTS))
        for layer in range(len(self.blocks)):
            for slot in slots:
                slot.captures.append(self._capture(layer, slot))
                self.counters.captures += 1
        self._arenas[signature] = slots

    def decide(self, signature: LeaseSignature) -> bool:
        """Whether a session of this size uses the graphs; if not, it counts as a fallback."""
        prepared = signature in self._arenas and not self.runtime.is_capturing()
        if not prepared:
            self.counters.fallbacks += 1
            logger.info(
                "a session of %d tokens per rank runs without post-attention graphs: prepared are "
                "%s (ar_diffusion_height and ar_diffusion_width)",
                signature.tokens,
                sorted(known.tokens for known in self._arenas),
            )
        return prepared

    def slots(self, signature: LeaseSignature) -> tuple[Slot, ...]:
        """The two slots of a prepared size."""
        return self._arenas[signature]

    # ------------------------------------------------------------ while a chunk is made

    def layer(self, index: int) -> BlockLeases:
        """The leases of one block."""
        return BlockLeases(self, index)

    @contextmanager
    def acquire(self, layer: int, inputs: LeaseInputs) -> Iterator[Lease]:
        """Borrow a slot: its inputs are copied, its last readers are waited for on the device.

        Raises:
            WorkerFailedError: if the controller has failed, or a block was changed.
            LeaseError: if the size is not prepared; nothing was touched.
            SlotsBusyError: if both slots are leased; nothing was touched.
        """
        lease = self._borrow(layer, inputs)
        try:
            self._fill(lease, inputs)
            yield lease
            self.check_healthy()
            lease.end()
            lease.slot.active = False
        except BaseException as error:
            self._fail(error, lease, inputs)
            raise

    # ------------------------------------------------------------ what leases ask for

    def check_healthy(self) -> None:
        """Raise if a lease has failed.

        Raises:
            WorkerFailedError: asking for a restart.
        """
        if self.failed:
            raise WorkerFailedError(
                "an earlier post-attention graph failed on this rank; restart all workers"
            )

    def check_unchanged(self, layer: int) -> None:
        """Raise if the block is not as it was when it was captured.

        Raises:
            WorkerFailedError: naming the first difference and asking for a restart.
        """
        changed = self._fingerprints[layer].difference(fingerprint(self.blocks[layer]))
        if changed is not None:
            raise WorkerFailedError(
                f"block {layer} was changed after its graph was captured ({changed}); restart all "
                "workers"
            )

    # ------------------------------------------------------------ inner parts

    def _capture(self, layer: int, slot: Slot) -> Capture:
        stream = self.runtime.current_stream(slot.attended.device)
        function = self.blocks[layer].post_attention
        try:
            capture = self.runtime.capture(function, slot.buffers, stream=stream, pool=slot.pool)
            _check_capture(capture, slot)
        except RuntimeError as error:
            raise ConfigError(
                f"the post-attention graph of block {layer} cannot be captured by the "
                f"{self.runtime.name} runtime: {error}; set lingbot_npu_leased_post_attention to "
                "false"
            ) from error
        return capture

    def _borrow(self, layer: int, inputs: LeaseInputs) -> Lease:
        with self._lock:
            self.check_healthy()
            self.check_unchanged(layer)
            signature = inputs.signature
            if signature not in self._arenas:
                raise LeaseError(f"no graphs were prepared for {signature}")
            free = [slot for slot in self._arenas[signature] if not slot.active]
            if not free:
                raise SlotsBusyError("both slots still have consumers")
            slot = min(free, key=lambda candidate: candidate.generation)
            slot.active = True
            slot.generation += 1
            return Lease(self, layer, slot, self.runtime.current_stream(signature.device))

    def _fill(self, lease: Lease, inputs: LeaseInputs) -> None:
        runtime, slot, stream = self.runtime, lease.slot, lease.stream
        for event in slot.completion:
            runtime.wait_event(stream, event)
            self.counters.slot_reuse_waits += 1
        slot.completion = []
        for source, target in zip(inputs.tensors, slot.inputs.tensors, strict=True):
            runtime.record_owner(source, stream)
            runtime.record_owner(target, stream)
            target.copy_(source)
            self.counters.conditioning_copy_bytes += target.nbytes
        runtime.record_owner(slot.attended, stream)

    def _fail(self, error: BaseException, lease: Lease, inputs: LeaseInputs) -> None:
        """Keep everything; the slot stays active, so nobody gets it again."""
        fixed = (self._fingerprints[lease.layer].owners, self.options.provider_owners)
        owners = (self, lease, lease.slot, inputs, *fixed)
        self.keep(owners)
        if not self.failed:
            self.failed = True
            self.options.report(_ORIGIN, error, owners)

    def keep(self, owners: tuple[object, ...]) -> None:
        """Release these objects never: the one report of a failure holds this controller."""
        self.quarantine.append(owners)

    def fingerprint(self, layer: int) -> Fingerprint:
        """What is remembered of a block."""
        return self._fingerprints[layer]


@dataclass(frozen=True, slots=True)
class BlockLeases:
    """The leases of one block."""

    controller: LeasedPostAttention
    layer: int

    def acquire(self, inputs: LeaseInputs) -> AbstractContextManager[Lease]:
        """See :meth:`LeasedPostAttention.acquire`."""
        return self.controller.acquire(self.layer, inputs)


@contextmanager
def asking_for_restart(leases: LeasedPostAttention | None, *owners: object) -> Iterator[None]:
    """Turn whatever made a lease fail into a lost worker.

    Args:
        owners: what the chunk's work may still touch; kept for ever after such a failure.

    Raises:
        WorkerFailedError: instead of the exception that made a lease fail.
    """
    try:
        yield
    except BaseException as error:
        if leases is not None and leases.failed:
            leases.keep(owners)
        if leases is not None and leases.failed and isinstance(error, Exception):
            raise WorkerFailedError(
                f"a post-attention graph failed ({type(error).__name__}: {error}); its memory is "
                "kept and all workers have to be restarted"
            ) from error
        raise


def _check_block(block: LingBotWorldBlock) -> None:
    projection = block.self_attn.o
    plain = isinstance(projection, RowParallelLinear) and isinstance(
        projection.method, PlainLinearMethod
    )
    if not plain:
        raise ConfigError(
            "lingbot_npu_leased_post_attention needs the attention's projection as the checkpoint "
            f"has it, got {type(projection).__name__}; leave quantization and linear_backend out"
        )
    if projection.group.size != 1:
        raise ConfigError(
            "lingbot_npu_leased_post_attention needs tensor_parallel_size 1, since a graph holds "
            f"no exchange; got {projection.group.size}"
        )
    weights = dict(projection.named_parameters(recurse=False))
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    if dtypes != {"weight": torch.bfloat16, "bias": torch.bfloat16}:
        raise ConfigError(
            "lingbot_npu_leased_post_attention needs an unquantised bfloat16 projection with a "
            f"bias, got {dtypes}; set dtype to bfloat16 and leave quantization out"
        )


def _check_capture(capture: Capture, slot: Slot) -> None:
    """Refuse outputs that consumers could not borrow.

    Raises:
        LeaseError: naming what is wrong.
    """
    wanted = (slot.attended.shape, slot.attended.dtype, slot.attended.device)
    got = [(output.shape, output.dtype, output.device) for output in capture.outputs]
    if got != [wanted] * len(PostAttention.__dataclass_fields__):
        raise LeaseError(f"a graph must return three tensors like {wanted}, got {got}")
    inputs = {buffer.untyped_storage().data_ptr() for buffer in slot.buffers}
    if any(output.untyped_storage().data_ptr() in inputs for output in capture.outputs):
        raise LeaseError("a graph's output shares memory with its inputs")
