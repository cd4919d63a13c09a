"""One block's captured graphs, the memory that they read, and what they depend on.

A graph keeps addresses of weights and the kernels of the code that ran. When a weight, a module, a
hook or a function on the captured path is replaced, the graph no longer computes what its block
would. So all of them are remembered when the graph is captured, and compared before each use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float32, Shaped
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from vllm_omni.diffusion.layers import norm
from vllm_omni.diffusion.layers.linear import PlainLinearMethod, RowParallelLinear
from vllm_omni.diffusion.models.lingbot_world import blocks
from vllm_omni.diffusion.models.lingbot_world.attention import CameraModulation
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.platforms.graphs import Capture, DeviceEvent, GraphPool, GraphRuntime

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


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


class LeaseInputs(NamedTuple):
    """What a block knows before its attention, in the order of the captured function's arguments.

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

    def fit(self, other: LeaseInputs) -> bool:
        """Tell whether each tensor has the shape, dtype and device of the other's."""
        return all(
            (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
            for mine, theirs in zip(self, other, strict=True)
        )


class LeaseOutputs(NamedTuple):
    """Outputs of the graph, borrowed from its memory, in the order of the function's results.

    Attributes:
        projected: output of the attention's projection.
        residual: the block's stream after gate and camera.
        normalised: input of the cross-attention.
    """

    projected: BFloat16[Tensor, "tokens dim"]
    residual: BFloat16[Tensor, "tokens dim"]
    normalised: BFloat16[Tensor, "tokens dim"]


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
        return (self.attended, *self.inputs)


def post_attention(
    block: LingBotWorldBlock,
    attended: BFloat16[Tensor, "tokens dim"],
    x: BFloat16[Tensor, "tokens dim"],
    gate: Float32[Tensor, "rows dim"],
    gain: BFloat16[Tensor, "tokens dim"],
    shift: BFloat16[Tensor, "tokens dim"],
) -> tuple[Tensor, ...]:
    """What is captured: projection, residual stream and input of the cross-attention."""
    projected = block.self_attn.o(attended)
    camera = CameraModulation(gain, shift)
    return projected, *block.after_projection(projected, x, gate, camera)


@dataclass(frozen=True, slots=True)
class CapturedBlock:
    """A block and its graphs, one for each slot.

    Attributes:
        index: of the block in its transformer.
    """

    index: int
    captures: tuple[Capture, ...]
    fingerprint: Fingerprint

    @classmethod
    def of(
        cls,
        block: LingBotWorldBlock,
        index: int,
        slots: Sequence[Slot],
        runtime: GraphRuntime,
    ) -> CapturedBlock:
        """Capture what follows the attention of a block, once over each slot.

        Raises:
            ConfigError: if the block's projection cannot be captured, or the capture fails.
        """
        _check_projection(block)
        fingerprint = Fingerprint(block)
        function = partial(post_attention, block)
        stream = runtime.current_stream(slots[0].attended.device)
        captures: list[Capture] = []
        for slot in slots:
            buffers = slot.buffers
            try:
                captures.append(runtime.capture(function, buffers, stream=stream, pool=slot.pool))
                _check_outputs(captures[-1].outputs, buffers)
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"the post-attention graph of block {index} cannot be captured by the "
                    f"{runtime.name} runtime: {error}; set lingbot_npu_leased_post_attention to "
                    "false"
                ) from error
        return cls(index, tuple(captures), fingerprint)

    def check_unchanged(self) -> None:
        """Compare the block with what it was when it was captured.

        Raises:
            WorkerFailedError: naming the first difference and asking for a restart.
        """
        change = self.fingerprint.change()
        if change is not None:
            raise WorkerFailedError(
                f"block {self.index} was changed after its graph was captured ({change}); restart "
                "all workers"
            )


class Fingerprint:
    """The objects on the captured path of one block, held and remembered.

    They are compared twice for each replay, so only what can change is looked at, by identity and
    without making new objects. Holding them keeps an identity from being given to another object.
    """

    def __init__(self, block: LingBotWorldBlock) -> None:
        self._entries: list[tuple[Mapping[str, object], str, object, str]] = []
        self._sizes: list[tuple[Mapping[str, object], int, str]] = []
        self._classes: list[tuple[object, type, str]] = []
        self._tensors: list[tuple[Tensor, int, int, str]] = []
        self._uncounted: list[tuple[Tensor, int, str]] = []
        self._codes: list[tuple[FunctionType, object, str]] = []
        attention, projection, normalisation = block.self_attn, block.self_attn.o, block.norm3
        self._watch_entry(_table(block, "_modules"), "self_attn", "attention")
        self._watch_entry(_table(attention, "_modules"), "o", "projection")
        self._watch_entry(_table(block, "_modules"), "norm3", "normalisation")
        self._watch_entry(vars(projection), "method", "linear method")
        self._watch_entry(vars(projection), "group", "group of the projection")
        self._watch_entry(vars(normalisation), "eps", "normalisation.eps")
        for name, part in (
            ("block", block),
            ("projection", projection),
            ("normalisation", normalisation),
            ("linear method", projection.method),
        ):
            # A method that is put on an object, or a compiled call, is one attribute more.
            self._sizes.append((vars(part), len(vars(part)), f"attributes of the {name}"))
            self._classes.append((part, type(part), f"class of the {name}"))
        self._watch_module(projection, "projection")
        self._watch_module(normalisation, "normalisation")
        self._watch_function(vars(blocks), "add_gated")
        self._watch_function(vars(norm), "layer_norm")
        self._watch_function(vars(F), "linear")
        self._watch_function(vars(F), "layer_norm")
        self._watch_method(block, "after_projection")
        self._watch_method(projection, "forward")
        self._watch_method(projection.method, "apply")
        self._watch_method(normalisation, "forward")
        for hooks in _GLOBAL_HOOKS:
            self._watch_all(vars(torch_module)[hooks], hooks)

    def change(self) -> str | None:
        """Return the name of the first object that is not what it was; ``None`` if all are."""
        try:
            return self._replaced() or self._rewritten()
        except KeyError as error:
            return f"{error} is gone"

    def _replaced(self) -> str | None:
        for table, key, value, name in self._entries:
            if table[key] is not value:
                return name
        for table, size, name in self._sizes:
            if len(table) != size:
                return name
        for thing, kind, name in self._classes:
            if type(thing) is not kind:
                return name
        return None

    def _rewritten(self) -> str | None:
        for tensor, address, writes, name in self._tensors:
            if tensor.data_ptr() != address or tensor._version != writes:  # noqa: SLF001 (its only name)
                return name
        for tensor, address, name in self._uncounted:
            if tensor.data_ptr() != address:
                return name
        for function, code, name in self._codes:
            if function.__code__ is not code:
                return name
        return None

    def _watch_entry(self, table: Mapping[str, object], key: str, name: str) -> None:
        self._entries.append((table, key, table[key], name))

    def _watch_all(self, table: Mapping[str, object], name: str) -> None:
        self._sizes.append((table, len(table), name))
        for key in table:
            self._watch_entry(table, key, f"{name} {key}")

    def _watch_module(self, module: nn.Module, name: str) -> None:
        for hooks in _HOOKS:
            self._watch_all(_table(module, hooks), f"{name} {hooks}")
        for kind in ("_parameters", "_buffers"):
            for key, tensor in _table(module, kind).items():
                self._watch_entry(_table(module, kind), key, f"{name}.{key}")
                if isinstance(tensor, Tensor):
                    self._watch_tensor(tensor, f"{name}.{key}")

    def _watch_tensor(self, tensor: Shaped[Tensor, "..."], name: str) -> None:
        # A tensor made in inference mode counts no writes; identity and address speak for it.
        if tensor.is_inference():
            self._uncounted.append((tensor, tensor.data_ptr(), name))
        else:
            writes = tensor._version  # noqa: SLF001 (its only name)
            self._tensors.append((tensor, tensor.data_ptr(), writes, name))

    def _watch_function(self, table: Mapping[str, object], key: str) -> None:
        self._watch_entry(table, key, key)
        function = table[key]
        if isinstance(function, FunctionType):
            self._codes.append((function, function.__code__, f"code of {key}"))

    def _watch_method(self, thing: object, name: str) -> None:
        defining = next(kind for kind in type(thing).__mro__ if name in vars(kind))
        self._watch_function(vars(defining), name)


def _table(module: object, name: str) -> dict[str, object]:
    """One of the dictionaries in which torch keeps parameters, sub-modules and hooks.

    Asking the module for a parameter takes microseconds, for hooks there is no public call.
    """
    return vars(module)[name]


def _check_projection(block: LingBotWorldBlock) -> None:
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


def _check_outputs(outputs: tuple[Tensor, ...], buffers: tuple[Tensor, ...]) -> None:
    """Refuse outputs that cannot be borrowed.

    Raises:
        ValueError: naming what is wrong.
    """
    attended = buffers[0]
    wanted = (attended.shape, attended.dtype, attended.device)
    got = [(output.shape, output.dtype, output.device) for output in outputs]
    if got != [wanted] * len(LeaseOutputs._fields):
        raise ValueError(f"a graph must return three tensors like {wanted}, got {got}")
    inputs = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    if any(output.untyped_storage().data_ptr() in inputs for output in outputs):
        raise ValueError("a graph's output shares memory with its inputs")
