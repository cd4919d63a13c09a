"""Quantisations for tests, written against vLLM's three calls and registered under a name.

Importing this module loads vLLM.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

STORED, ONLINE = "omni_test_stored_int8", "omni_test_online_int8"
DESCRIPTION = "int8_description.json"


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales of a weight, by output row; ``weight ~ bytes * scale``."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


class _Config(QuantizationConfig):
    def get_supported_act_dtypes(self):
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls):
        return -1

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        made = cls()
        made.description = config
        return made

    def __init__(self) -> None:
        super().__init__()
        self.description: dict[str, object] = {}
        self.prefixes: list[str] = []


@register_quantization_config(STORED)
class StoredInt8(_Config):
    """The checkpoint holds bytes, and a scale for each output row beside them."""

    def get_name(self):
        return STORED

    @staticmethod
    def get_config_filenames():
        return [DESCRIPTION]

    def get_quant_method(self, _layer, prefix):
        self.prefixes.append(prefix)
        return _StoredMethod()


class _StoredMethod(LinearMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, *_rest, **_more
    ):
        rows = sum(output_partition_sizes)
        weight = torch.empty(rows, input_size_per_partition, dtype=torch.int8)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=weight, input_dim=1, output_dim=0, weight_loader=layer.weight_loader
            ),
        )
        layer.weight.requires_grad_(requires_grad=False)
        layer.register_parameter(
            "weight_scale",
            ChannelQuantScaleParameter(
                data=torch.empty(rows, 1), output_dim=0, weight_loader=layer.weight_loader
            ),
        )

    def apply(self, layer, x, bias=None):
        return F.linear(x, (layer.weight * layer.weight_scale).to(x.dtype), bias)


@register_quantization_config(ONLINE)
class OnlineInt8(_Config):
    """Weights become bytes after loading, activations when they come; feed-forward only."""

    def get_name(self):
        return ONLINE

    def get_quant_method(self, _layer, prefix):
        self.prefixes.append(prefix)
        return _OnlineMethod() if ".ffn." in f".{prefix}" else UnquantizedLinearMethod()


class _OnlineMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer):
        rows, scale = quantize(layer.weight)
        layer.weight = nn.Parameter(rows, requires_grad=False)
        layer.register_buffer("scale", scale.squeeze(1))

    def apply(self, layer, x, bias=None):
        rows, scale = quantize(x.reshape(-1, x.shape[-1]))
        product = torch._int_mm(rows, layer.weight.t()).float() * scale * layer.scale
        product = product.to(x.dtype).reshape(*x.shape[:-1], -1)
        return product if bias is None else product + bias


class Fp8Quantizer:
    """In the place of an operator that vLLM's CPU build lacks: rounds a weight to 8-bit floats.

    Attributes:
        weights: how many were rounded.
    """

    LARGEST = 448.0

    def __init__(self) -> None:
        self.weights = 0

    def __call__(
        self, weight: Tensor, scale: Tensor | None = None, **_options: object
    ) -> tuple[Tensor, Tensor]:
        assert not weight.is_meta
        self.weights += 1
        if scale is None:
            scale = weight.float().abs().max().reshape(1) / self.LARGEST
        scaled = (weight.float() / scale).clamp(-self.LARGEST, self.LARGEST)
        return scaled.to(torch.float8_e4m3fn), scale
