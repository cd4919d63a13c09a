"""Quantisations of vLLM: found by name, loaded through the package's own loader, refused in words.

The two 8-bit integer methods are the tests' own and run whole. For vLLM's ``fp8`` the CPU build
lacks one operator, the rounding of a weight, which :class:`Fp8Quantizer` replaces; the rest of
the method, loading, choice of kernel and product, is vLLM's.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.distributed import run_ranks
from tests.helpers.linear_layers import DIM, Layers, checkpoint, draw, tokens
from tests.helpers.rollouts import roll
from tests.helpers.tiny import tiny_checkpoint_dir
from tests.vllm.installed import VLLM_WARNS, requires_vllm
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.layers.linear import create_linear_backend
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.errors import CheckpointError, ConfigError

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.cpu,
    requires_vllm,
    VLLM_WARNS,
]

CPU = torch.device("cpu")


def backend(quantization, folder=Path(), state=None, dtype=torch.float32):
    return create_linear_backend(
        "vllm",
        quantization,
        checkpoint=folder,
        parallel=state or ParallelState(),
        device=CPU,
        dtype=dtype,
    )


def stored_products(state: ParallelState, folder: str) -> dict[str, torch.Tensor]:
    """Layers of one rank from a checkpoint that holds bytes and scales, all but one layer."""
    from tests.vllm.quantizations import STORED

    layers = Layers(state, torch.float32)
    made = backend({"method": STORED, "ignored_layers": ("head",)}, Path(folder), state)
    assert made.quantization.description == {"bits": 8}
    made.install(layers)
    assert made.quantization.prefixes == ["attn.qkv", "ffn.0", "ffn.2"]
    targets, tensors = weight_targets(layers), stored_checkpoint()
    assert set(targets) == set(tensors)
    for name in sorted(targets):
        assert targets[name].shape == tuple(tensors[name].shape), name
        targets[name].store(tensors[name][targets[name].local_slices()].clone())
    made.process(layers)
    x = tokens(torch.float32, 0)
    with torch.inference_mode():
        outputs = {"qkv": layers.attn.qkv(x), "ffn": layers.ffn(x), "head": layers.head(x)}
    made.release()
    return outputs


def stored_checkpoint() -> dict[str, torch.Tensor]:
    from tests.vllm.quantizations import quantize

    tensors = checkpoint(torch.float32)
    for name in [name for name in tensors if name.endswith(".weight") and name != "head.weight"]:
        tensors[name], tensors[f"{name}_scale"] = quantize(tensors[name])
    return tensors


@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_of_bytes_and_scales_loads(tp, tmp_path):
    """Up to the order of sums: the oracle multiplies whole, dequantised weights."""
    from tests.vllm.quantizations import DESCRIPTION

    (tmp_path / DESCRIPTION).write_text(json.dumps({"bits": 8}))
    if tp == 1:
        ranks = [stored_products(ParallelState(), str(tmp_path))]
    else:
        parallel = DiffusionParallelConfig(tensor_parallel_size=tp)
        ranks = run_ranks(stored_products, str(tmp_path), parallel=parallel)
    tensors, x = stored_checkpoint(), tokens(torch.float32, 0)

    def linear(name, value):
        weight = tensors[f"{name}.weight"]
        if weight.dtype is torch.int8:
            weight = weight * tensors[f"{name}.weight_scale"]
        return F.linear(value, weight, tensors[f"{name}.bias"])

    for rank, made in enumerate(ranks):
        rows = slice(rank * DIM // tp, (rank + 1) * DIM // tp)
        qkv = torch.cat([linear(f"attn.{part}", x)[:, rows] for part in "qkv"], dim=-1)
        ffn = linear("ffn.2", F.gelu(linear("ffn.0", x), approximate="tanh"))
        for name, wanted in {"qkv": qkv, "ffn": ffn, "head": linear("head", x)}.items():
            torch.testing.assert_close(made[name], wanted, rtol=0, atol=1e-5)


def test_a_method_without_its_description_is_refused(tmp_path):
    from tests.vllm.quantizations import DESCRIPTION, STORED

    with pytest.raises(ConfigError, match=DESCRIPTION):
        backend({"method": STORED}, tmp_path)


def tiny(**quantization: object) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()),
        geometry=VideoGeometry(64, 96),
        linear_backend="vllm",
        quantization=quantization,
    )


def relative_error(config: OmniDiffusionConfig) -> float:
    made = roll(ParallelState(), config, num_chunks=2)
    plain = replace(config, linear_backend="native", quantization={})
    wanted = roll(ParallelState(), plain, num_chunks=2)
    pairs = zip(made.outputs, wanted.outputs, strict=True)
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


def test_bytes_made_after_loading_are_near_the_plain_model():
    """Lossy: about 1 % on each product of the feed-forward; 5 % is allowed on the latents."""
    from tests.vllm.quantizations import ONLINE

    error = relative_error(tiny(method=ONLINE))
    print(f"online int8, feed-forward only: relative error {error:.3g}")
    assert 0 < error < 0.05


AMX_KERNEL = "CPUFp8PerTensorScaledMMLinearKernel"
"""What vLLM 0.32 takes on processors with AMX; it takes no bias in bfloat16."""
KEPT = ("time_*", "transformer.text_embedding.*", "head.head")


@pytest.mark.parametrize("method", ["fp8", "fp8_per_tensor"])
def test_fp8_quantises_what_is_not_ignored(method, monkeypatch):
    """Lossy: three bits of mantissa on weights and activations; 10 % is allowed on the latents."""
    import vllm._custom_ops as operators

    from tests.vllm.quantizations import Fp8Quantizer

    monkeypatch.setenv("VLLM_DISABLED_KERNELS", AMX_KERNEL)
    counts, errors = [], []
    for ignored in ((), KEPT):
        quantizer = Fp8Quantizer()
        monkeypatch.setattr(operators, "scaled_fp8_quant", quantizer)
        errors.append(relative_error(tiny(method=method, ignored_layers=ignored)))
        counts.append(quantizer.weights)
    print(f"{method}: relative error {errors[0]:.3g}, with {KEPT} kept {errors[1]:.3g}")
    # time_embedding.0 and .2, time_projection.1, text_embedding.0 and .2, head.head.
    assert counts[0] - counts[1] == 6
    assert 0 < errors[1] < errors[0] < 0.1


def test_fp8_where_an_operator_is_missing_is_refused_in_words():
    """vLLM's CPU build; on a build that has the operator there is nothing to refuse."""
    with pytest.raises(ConfigError, match=r"does not run on this device: .*scaled_fp8_quant"):
        roll(ParallelState(), tiny(method="fp8"), num_chunks=1)


def test_a_kernel_that_cannot_run_is_refused_while_loading(monkeypatch):
    import vllm._custom_ops as operators

    from tests.vllm.quantizations import Fp8Quantizer

    def broken(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("expected scalar type Float but found BFloat16")

    monkeypatch.setattr(operators, "scaled_fp8_quant", Fp8Quantizer())
    monkeypatch.setattr(
        "vllm.model_executor.layers.quantization.online.fp8.Fp8PerTensorOnlineLinearMethod.apply",
        broken,
    )
    with pytest.raises(ConfigError, match=r"does not run on this device: .*expected scalar type"):
        roll(ParallelState(), tiny(method="fp8"), num_chunks=1)


def test_a_method_that_this_vllm_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"'ascend'.*does not know it"):
        backend({"method": "ascend"})


def test_an_ignored_name_that_names_nothing_is_refused():
    made = backend({"method": "fp8", "ignored_layers": ("attn.o",)})
    with pytest.raises(ConfigError, match=r"'attn\.o' names no linear; names are like attn\.qkv"):
        made.install(Layers(ParallelState(), torch.bfloat16))


def test_scales_that_the_checkpoint_lacks_are_named(tmp_path):
    """The loader compares names before it reads values."""
    from safetensors.torch import save_file

    from tests.vllm.quantizations import DESCRIPTION, STORED
    from vllm_omni.diffusion.models.loader import load_weights

    (tmp_path / DESCRIPTION).write_text("{}")
    save_file(checkpoint(torch.float32), tmp_path / "diffusion_pytorch_model.safetensors")
    layers = Layers(ParallelState(), torch.float32)
    backend({"method": STORED}, tmp_path).install(layers)
    with pytest.raises(CheckpointError, match=r"missing.*attn\.k\.weight_scale"):
        load_weights(tmp_path, weight_targets(layers))


def test_methods_of_our_own_keep_their_layers():
    """A layer whose weights this package quantises is not vLLM's to make."""
    from vllm_omni.diffusion.layers.linear import ReplicatedLinear
    from vllm_omni.diffusion.layers.linear_vllm import VllmLinear
    from vllm_omni.diffusion.layers.quant_w8a8 import Int8LinearMethod
    from vllm_omni.platforms.base import Int8Ops

    dtype = torch.bfloat16
    layers = Layers(ParallelState(), dtype)
    method = Int8LinearMethod(Int8Ops(), fractal=False)
    layers.head = ReplicatedLinear(DIM, 48, dtype, method)
    made = backend({}, dtype=dtype)
    made.install(layers)
    assert isinstance(layers.ffn[0], VllmLinear)
    assert isinstance(layers.head, ReplicatedLinear)
    for name, target in weight_targets(layers).items():
        target.store(checkpoint(dtype)[name][target.local_slices()])
    made.process(layers)
    with torch.inference_mode():
        product = layers.head(tokens(dtype, 0))
    whole = checkpoint(dtype)
    wanted = F.linear(tokens(dtype, 0), whole["head.weight"], whole["head.bias"])
    assert (product - wanted).norm() < 0.02 * wanted.norm()
    assert draw(1, seed=0).dtype == torch.float32  # torch's default is what it was
