"""Notices when a captured graph no longer computes what its block would.

A graph keeps addresses of weights and the kernels of the code that ran. So the identity of every
parameter, module, hook and function on the captured path is remembered, with the objects held, so
that no identity can be given to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from vllm_omni.diffusion.layers import norm
from vllm_omni.diffusion.models.lingbot_world import blocks
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock

Fact = tuple[str, tuple[object, ...]]
_INFERENCE_VERSION = -1
"""Tensors made in inference mode count no writes; identity and address speak for them."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named facts of one block.

    Attributes:
        facts: comparable values.
        owners: the objects behind them.
    """

    facts: tuple[Fact, ...]
    owners: tuple[object, ...]

    def difference(self, other: Fingerprint) -> str | None:
        """Name of the first fact that differs; ``None`` if none does."""
        if self.facts == other.facts:
            return None
        theirs = dict(other.facts)
        changed = [name for name, value in self.facts if theirs.get(name) != value]
        return changed[0] if changed else "something new on the captured path"


def fingerprint(block: LingBotWorldBlock) -> Fingerprint:
    """Facts of everything between the attention's output and the cross-attention's input."""
    projection, normalisation = block.self_attn.o, block.norm3
    owners: list[object] = [block, projection, normalisation, projection.method]
    facts: list[Fact] = [
        ("block", (id(block),)),
        ("projection", (id(projection), type(projection), projection.group)),
        ("linear method", (id(projection.method), type(projection.method))),
        ("normalisation", (id(normalisation), type(normalisation), normalisation.eps)),
    ]
    for name, module in (("projection", projection), ("normalisation", normalisation)):
        for part, tensor in _tensors(module):
            owners.append(tensor)
            facts.append((f"{name}.{part}", _tensor_identity(tensor)))
        for part, hook in _hooks(module):
            owners.append(hook)
            facts.append((f"{name} {part}", _callable_identity(hook)))
    for part, hook in _global_hooks():
        owners.append(hook)
        facts.append((part, _callable_identity(hook)))
    for name, function in _functions(block):
        owners.append(function)
        facts.append((name, _callable_identity(function)))
    return Fingerprint(tuple(facts), tuple(owners))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _tensor_identity(tensor: Shaped[Tensor, "..."]) -> tuple[object, ...]:
    counted = not tensor.is_inference()
    version = tensor._version if counted else _INFERENCE_VERSION  # noqa: SLF001 (its only name)
    return id(tensor), tensor.data_ptr(), version


def _hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., object]]]:
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        for key, hook in vars(module)[kind].items():
            yield f"{kind} {key}", hook


def _global_hooks() -> Iterator[tuple[str, Callable[..., object]]]:
    """Hooks on the forwards of all modules; torch gives them no public list."""
    for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        for key, hook in vars(torch_module)[kind].items():
            yield f"{kind} {key}", hook


def _functions(block: LingBotWorldBlock) -> Iterator[tuple[str, Callable[..., object]]]:
    projection, normalisation = block.self_attn.o, block.norm3
    yield "post_attention", block.post_attention
    yield "after_projection", block.after_projection
    yield "add_gated", blocks.add_gated
    yield "projection forward", projection.forward
    yield "linear method apply", projection.method.apply
    yield "normalisation forward", normalisation.forward
    yield "layer_norm", norm.layer_norm
    yield "torch linear", F.linear
    yield "torch layer_norm", F.layer_norm
    for name, module in (("projection", projection), ("normalisation", normalisation)):
        compiled = vars(module).get("_compiled_call_impl")
        if compiled is not None:
            yield f"{name} compiled call", compiled


def _callable_identity(function: Callable[..., object]) -> tuple[object, ...]:
    """Receiver, function and code; taking a bound method makes a new object each time.

    Code objects compare by what they do, so the object itself is the fact.
    """
    if isinstance(function, MethodType):
        return id(function.__self__), *_callable_identity(function.__func__)
    if isinstance(function, FunctionType):
        return id(function), function.__code__
    return (id(function),)
