"""The platform of Ascend NPUs.

Only this file and the attention backend of NPUs name torch_npu.
"""

from types import ModuleType

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor
from typing_extensions import override

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.base import (
    AcceleratorPlatform,
    Angles,
    ArrangedWeight,
    CompletionEvent,
    Int8Ops,
    QuantizedRows,
    RotaryMul,
    Turned,
    Weight,
)
from vllm_omni.platforms.graphs import DeviceGraphRuntime, GraphRuntime

_FRACTAL_NZ = 29
"""Number of the tiled weight layout in the vendor's list of formats."""


def load_torch_npu() -> ModuleType:
    """Import torch_npu, which adds the device ``npu`` to torch.

    Raises:
        ConfigError: if it is not installed or its CANN libraries are missing.
    """
    try:
        import torch_npu
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"device npu needs torch_npu and CANN, which cannot be loaded: {error}; install the "
            "versions of docs/recipes/lingbot_world_v2_npu.md and source CANN's set_env.sh, or "
            "choose another device"
        ) from error
    return torch_npu


class NpuPlatform(AcceleratorPlatform):
    """Runs on one NPU per rank, with HCCL and the vendor's fused attention."""

    name = "npu"
    collective_backend = "hccl"
    attention_backend = "npu_fusion"

    def __init__(self) -> None:
        self._torch_npu = load_torch_npu()
        super().__init__(self._torch_npu.npu)

    @override
    def device(self, local_rank: int) -> torch.device:
        """Return NPU ``local_rank`` of those that are visible.

        Raises:
            ConfigError: if torch_npu sees no such NPU.
        """
        visible = self._module.device_count()
        if visible <= local_rank:
            raise ConfigError(
                f"rank {local_rank} needs device npu, but torch_npu sees {visible} NPUs; check "
                "npu-smi info, devices (numbers must rise) and ASCEND_RT_VISIBLE_DEVICES, or set "
                "device: cpu"
            )
        device = torch.device("npu", local_rank)
        self._module.set_device(device)
        return device

    @override
    def completion_event(self, device: torch.device) -> CompletionEvent:
        return self._recorded_event(device)

    @override
    def int8_ops(self) -> Int8Ops:
        return NpuInt8Ops(self._torch_npu)

    @override
    def rotary_mul(self) -> RotaryMul:
        return NpuRotaryMul(self._torch_npu)

    @override
    def graph_runtime(self) -> GraphRuntime:
        return DeviceGraphRuntime("npu", self._module, self._module.NPUGraph)


class NpuRotaryMul(RotaryMul):
    """The vendor's fused rotary operator."""

    name = "npu"

    def __init__(self, torch_npu: ModuleType) -> None:
        self._torch_npu = torch_npu

    @override
    def __call__(self, x: Turned, cos: Angles, sin: Angles) -> Turned:
        # Without a mode the operator would pair the halves of a head.
        return self._torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="interleave")


class NpuInt8Ops(Int8Ops):
    """The vendor's dynamic 8-bit quantisation and matrix product."""

    name = "npu"
    widest = 65535

    def __init__(self, torch_npu: ModuleType) -> None:
        self._torch_npu = torch_npu

    @override
    def quantize_rows(self, x: Float[Tensor, "rows columns"]) -> QuantizedRows:
        return self._torch_npu.npu_dynamic_quant(x)

    @override
    def arrange_weight(self, weight: Weight, *, fractal: bool) -> ArrangedWeight:
        """Transpose and cast to NZ if asked. No view may be taken of an NZ tensor afterwards."""
        arranged = weight.t().contiguous()
        if not fractal:
            return arranged
        # Without this the cast keeps the plain layout and only warns.
        self._torch_npu.npu.config.allow_internal_format = True
        return self._torch_npu.npu_format_cast(arranged, _FRACTAL_NZ)

    @override
    def matmul(
        self,
        x: Int8[Tensor, "rows inner"],
        weight: ArrangedWeight,
        *,
        row_scale: Float32[Tensor, " rows"],
        column_scale: Float32[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "rows columns"]:
        # Without an output dtype the result would be int8.
        return self._torch_npu.npu_quant_matmul(
            x, weight, column_scale, pertoken_scale=row_scale, bias=bias, output_dtype=dtype
        )
