"""Whatever changes what a captured graph should compute is noticed before anything is written."""

import copy
import gc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module

from tests.helpers.leases import (
    DIM,
    attended,
    blocks,
    inference,
    leases,
    new_blocks,
    quarantine,
    runtime,
    some_inputs,
    use,
)
from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.layers import norm
from vllm_omni.diffusion.layers.linear import PlainLinearMethod, RowParallelLinear
from vllm_omni.diffusion.models.lingbot_world import blocks as blocks_module
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.diffusion.models.lingbot_world.lease_capture import Fingerprint
from vllm_omni.errors import WorkerFailedError

__all__ = ["blocks", "inference", "leases", "quarantine", "runtime"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def write_in_place(block, _):
    block.self_attn.o.weight.add_(1.0)


def replace_parameter(block, _):
    block.norm3.bias = torch.nn.Parameter(torch.zeros(DIM).bfloat16(), requires_grad=False)


def move_storage(block, _):
    block.self_attn.o.bias.data = block.self_attn.o.bias.data.clone()


def share_storage(block, _):
    """Another parameter over the same memory, as old as the first."""
    block.norm3.bias = torch.nn.Parameter(block.norm3.bias.detach(), requires_grad=False)


def replace_attention(block, _):
    """Another self-attention with the projection of the first."""
    block.self_attn = copy.copy(block.self_attn)


def patch_forward(_, patch):
    patch.setattr(norm.AffineLayerNorm, "forward", lambda _, x: x)


def replace_projection(block, _):
    """Another projection with the tensors of the first."""
    block.self_attn.o = copy.copy(block.self_attn.o)


def change_group(block, _):
    block.self_attn.o.group = RankGroup(0, 2, None)


def change_class(block, _):
    """One that inherits its forward, but may be called otherwise."""
    block.self_attn.o.__class__ = type("Another", (RowParallelLinear,), {})


def replace_module(block, _):
    block.norm3 = norm.AffineLayerNorm(DIM, 1e-6, torch.bfloat16)


def replace_method(block, _):
    block.self_attn.o.method = PlainLinearMethod()


def change_epsilon(block, _):
    block.norm3.eps = 0.5


def add_hook(block, _):
    block.norm3.register_forward_hook(lambda *_: None)


def add_pre_hook(block, _):
    block.self_attn.o.register_forward_pre_hook(lambda *_: None)


def compile_module(block, _):
    block.norm3.compile(backend="eager")


def override_forward(block, _):
    block.norm3.forward = types.MethodType(lambda _, x: x, block.norm3)


def override_projection_forward(block, _):
    block.self_attn.o.forward = types.MethodType(lambda _, x: x, block.self_attn.o)


def override_after_projection(block, _):
    block.after_projection = types.MethodType(lambda _, x, *__: (x, x), block)


def add_global_hook(_, patch):
    patch.setitem(torch_module._global_forward_hooks, 0, lambda *_: None)


def add_global_pre_hook(_, patch):
    patch.setitem(torch_module._global_forward_pre_hooks, 0, lambda *_: None)


def override_method(block, patch):
    patch.setattr(block.self_attn.o.method, "apply", lambda *_: None)


def patch_layer_norm(_, patch):
    patch.setattr(norm, "layer_norm", lambda x, *_: x)


def patch_gate(_, patch):
    patch.setattr(blocks_module, "add_gated", lambda x, *_: x)


def patch_torch_linear(_, patch):
    patch.setattr(F, "linear", lambda x, *_: x)


def patch_torch_layer_norm(_, patch):
    patch.setattr(F, "layer_norm", lambda x, *_: x)


def rebind_code(_, patch):
    function = LingBotWorldBlock.after_projection
    patch.setattr(function, "__code__", function.__code__.replace(co_name="another"))


CHANGES = (
    write_in_place, replace_parameter, move_storage, share_storage, replace_projection,
    change_group, change_class, replace_module, replace_method, change_epsilon, add_hook,
    add_pre_hook, add_global_hook, add_global_pre_hook, compile_module, override_forward,
    override_projection_forward, override_after_projection, override_method, replace_attention,
    patch_forward, patch_layer_norm, patch_gate, patch_torch_linear, patch_torch_layer_norm,
    rebind_code,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_block_is_refused_before_anything_is_written(
    leases, blocks, runtime, monkeypatch, change
):
    use(leases, blocks[0])
    runtime.log.clear()
    with torch.inference_mode(mode=False):
        change(blocks[0], monkeypatch)
    with pytest.raises(WorkerFailedError, match=r"block 0 was changed .*restart all workers"):
        use(leases, blocks[0])
    assert runtime.log == []
    assert not leases.record.failed
    monkeypatch.undo()


def test_a_change_during_a_lease_poisons_it(leases, blocks, quarantine):
    def changed_meanwhile():
        with leases.acquire(blocks[0], some_inputs()) as lease:
            lease.stage(attended())
            change_epsilon(blocks[0], None)
            lease.finish()

    with pytest.raises(WorkerFailedError, match="was changed"):
        changed_meanwhile()
    assert leases.record.failed
    assert leases.record.replays == 0
    assert quarantine.size == 1


def test_other_blocks_go_on(leases, blocks):
    change_epsilon(blocks[0], None)
    use(leases, blocks[1])


def test_nothing_changes_by_itself_and_the_objects_are_held(leases, blocks):
    """Held: an identity that was given up could come back as another object's."""
    block = blocks[0]
    fingerprint = Fingerprint(block)
    use(leases, block)
    assert fingerprint.change() is None
    for name in ("weight", "bias"):
        replaced = weakref.ref(block.norm3.get_parameter(name))
        setattr(block.norm3, name, torch.nn.Parameter(torch.zeros(DIM), requires_grad=False))
        gc.collect()
        assert replaced() is not None
    assert fingerprint.change() == "normalisation.weight"


def test_weights_made_in_inference_mode_have_no_version_and_still_identity():
    (block, _) = new_blocks()
    with torch.inference_mode():
        block.norm3.weight = torch.nn.Parameter(torch.ones(DIM).bfloat16(), requires_grad=False)
        before = Fingerprint(block)
        assert before.change() is None
        block.norm3.weight = torch.nn.Parameter(torch.ones(DIM).bfloat16(), requires_grad=False)
    assert before.change() == "normalisation.weight"
