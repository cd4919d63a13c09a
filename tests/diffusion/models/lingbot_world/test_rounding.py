"""Where a bfloat16 model rounds: each step of a block against its formula, on its own inputs.

Step by step, because one value that is rounded otherwise moves all later ones; over a whole forward
one rounding too many is lost in the noise of bfloat16.
"""

import pytest
import torch
from torch import Tensor

from tests.helpers.model_builders import ModelRollout, small_transformer
from vllm_omni.diffusion.layers.norm import RMSNormAcrossHeads
from vllm_omni.diffusion.models.lingbot_world.attention import CameraModulation
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock, TimeEmbedding

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

NEARLY_ALL = 0.995
"""Share of values that must be equal bit for bit: float32 sums and the float64 of these formulas
round to another bfloat16 only beside a tie, once in some thousand values."""
TOO_FEW = 0.98
"""One rounding too many changes more values than this leaves."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def low(x: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return x.bfloat16().double()


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def equal_share(made: Tensor, expected: Tensor) -> float:
    assert made.dtype == torch.bfloat16
    return float((made.double() == expected).double().mean())


class Seen:
    """Inputs and outputs of a block's modules in one forward at a chunk with history."""

    def __init__(self) -> None:
        model = small_transformer(dtype=torch.bfloat16)
        rollout = ModelRollout(model)
        rollout.commit(0)
        self.block: LingBotWorldBlock = model.layers[1]
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        modules = {"self_attn", "norm3", "cross_attn", "ffn", "self_attn.norm_q"}
        for name in modules:
            self._watch(self.block.get_submodule(name), name)
        self._watch(self.block, "block")
        self._watch(model.head, "head")
        self._watch(model.head.head, "head.linear")
        self.head = model.head
        self.time: TimeEmbedding = rollout.time(833.3)
        self.context = rollout.context(1)
        latents = torch.randn(36, 3, 4, 6, generator=torch.Generator().manual_seed(5))
        model(latents.bfloat16(), self.time, self.context)
        self.camera: CameraModulation = self.context.camera[1]

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        def remember(_: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
            self.inputs[name], self.outputs[name] = inputs[0].clone(), output.clone()

        module.register_forward_hook(remember)

    def rows(self, *, early: bool) -> tuple[Tensor, ...]:
        """The six rows of modulation; ``early``: rounded to bfloat16 one time too many."""
        rows = self.block.modulation.double() + self.time.blocks.double()
        return (low(rows) if early else rows)[0].unbind(0)


@pytest.fixture(scope="module")
def seen() -> Seen:
    with torch.inference_mode():
        return Seen()


def modulated(x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    shift, scale = rows
    return low(normalised(x) * (1 + scale) + shift)


@pytest.mark.parametrize("early", [False, True])
def test_modulation_is_summed_wide(seen, early):
    rows = seen.rows(early=early)
    before_ffn = low(seen.inputs["norm3"].double() + seen.outputs["cross_attn"].double())
    shares = [
        equal_share(seen.inputs["self_attn"], modulated(seen.inputs["block"].double(), rows[:2])),
        equal_share(seen.inputs["ffn"], modulated(before_ffn, rows[3:5])),
    ]
    assert all(share < TOO_FEW if early else share > NEARLY_ALL for share in shares), shares


@pytest.mark.parametrize("early", [False, True])
def test_the_modulation_of_the_head_is_summed_wide(seen, early):
    table = seen.head.modulation.double() + seen.time.head.double().unsqueeze(1)
    rows = (low(table) if early else table)[0].unbind(0)
    share = equal_share(seen.inputs["head.linear"], modulated(seen.inputs["head"].double(), rows))
    assert share < TOO_FEW if early else share > NEARLY_ALL, share


@pytest.mark.parametrize("early", [False, True])
def test_a_gated_sum_is_rounded_once(seen, early):
    """The end of the feed-forward part; ``early`` rounds the product before the sum."""
    before = low(seen.inputs["norm3"].double() + seen.outputs["cross_attn"].double())
    update = seen.outputs["ffn"].double() * seen.rows(early=False)[5]
    share = equal_share(seen.outputs["block"], low(before + (low(update) if early else update)))
    assert share < TOO_FEW if early else share > NEARLY_ALL, share


@pytest.mark.parametrize("wide", [False, True])
def test_the_camera_rounds_after_each_operation(seen, wide):
    """Gain and shift are arithmetic of bfloat16; ``wide`` rounds only at the end."""
    gated = seen.outputs["self_attn"].double() * seen.rows(early=False)[2]
    x = low(seen.inputs["block"].double() + gated) * seen.camera.gain.double()
    expected = low((x if wide else low(x)) + seen.camera.shift.double())
    share = equal_share(seen.inputs["norm3"], expected)
    assert share < TOO_FEW if wide else share > NEARLY_ALL, share


@pytest.mark.parametrize("early", [False, True])
def test_norms_with_weights_round_once(seen, early):
    norm = seen.block.norm3
    x = normalised(seen.inputs["norm3"].double())
    affine = (low(x) if early else x) * norm.weight.double() + norm.bias.double()
    rms: RMSNormAcrossHeads = seen.block.self_attn.norm_q
    q = seen.inputs["self_attn.norm_q"].double()
    q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    shares = [
        equal_share(seen.outputs["norm3"], low(affine)),
        equal_share(
            seen.outputs["self_attn.norm_q"], low((low(q) if early else q) * rms.weight.double())
        ),
    ]
    assert all(share < TOO_FEW if early else share > NEARLY_ALL for share in shares), shares
