"""Linears in 8 bits: weights by output channel, activations by token, both while the model runs.

``y = (x8 @ w8) * s_token * s_channel + bias`` with ``w8 = round(w / s_channel)``. What a product
loses is measured by ``python -m vllm_omni.tools.quant_report``.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.int8 import Int8Ops

_DTYPES = (torch.float16, torch.bfloat16)


class Int8LinearMethod:
    """A linear method (see ``LinearMethod``) that replaces each weight by bytes and scales.

    Args:
        ops: the device's operators.
        fractal: keep weights in the device's own tiles.
    """

    def __init__(self, ops: Int8Ops, *, fractal: bool) -> None:
        self.ops = ops
        self.fractal = fractal

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        """Register the weight as the checkpoint has it; the bytes come after loading.

        Raises:
            ConfigError: if the operators take neither the dtype nor the size.
        """
        if dtype not in _DTYPES:
            raise ConfigError(
                f"lingbot_npu_quant: w8a8 needs dtype bfloat16 or float16, got {dtype}"
            )
        widest = max(in_features, out_features)
        if widest > self.ops.widest:
            raise ConfigError(
                f"a linear of {in_features} to {out_features} features is too wide for w8a8, "
                f"which takes {self.ops.widest}; leave lingbot_npu_quant out or raise "
                "tensor_parallel_size"
            )
        layer.register_parameter(
            "weight", nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise and arrange the weight, once; the loaded one is dropped."""
        if "weight_int8" in dict(layer.named_buffers(recurse=False)):
            return
        self.add_int8_weight(layer)
        del layer.weight

    def add_int8_weight(self, layer: nn.Module) -> None:
        """Register ``weight_int8`` ``[in, out]`` and ``weight_scale`` ``[out]`` by the weight."""
        rows, scale = self.ops.quantize_rows(layer.get_parameter("weight").detach())
        arranged = self.ops.arrange_weight(rows, fractal=self.fractal)
        layer.register_buffer("weight_int8", arranged, persistent=False)
        layer.register_buffer("weight_scale", scale, persistent=False)

    def apply(
        self, layer: nn.Module, x: Float[Tensor, "*batch n"], bias: Float[Tensor, " m"] | None
    ) -> Float[Tensor, "*batch m"]:
        """Quantise the tokens and multiply."""
        tokens, token_scale = self.ops.quantize_rows(x.reshape(-1, x.shape[-1]))
        product = self.ops.matmul(
            tokens,
            layer.get_buffer("weight_int8"),
            row_scale=token_scale,
            column_scale=layer.get_buffer("weight_scale"),
            bias=bias,
            dtype=x.dtype,
        )
        return product.reshape(*x.shape[:-1], product.shape[-1])
