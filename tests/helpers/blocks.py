"""Blocks of the tiny model with random weights, without a checkpoint."""

import json
from importlib.resources import files

import torch

from vllm_omni.diffusion.attention.sdpa import SdpaAttention
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.layers.linear import LinearMethod, PlainLinearMethod
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig


def tiny_transformer_config() -> LingBotWorldConfig:
    text = files("vllm_omni").joinpath("data/tiny_checkpoint/transformer/config.json").read_text()
    return LingBotWorldConfig.from_dict(json.loads(text))


def tiny_parts(
    *,
    dtype: torch.dtype = torch.bfloat16,
    linear: LinearMethod | None = None,
    tensor_parallel: RankGroup = SINGLE,
) -> LayerParts:
    return LayerParts(
        config=tiny_transformer_config(),
        dtype=dtype,
        linear=linear or PlainLinearMethod(),
        backend=SdpaAttention(),
        tensor_parallel=tensor_parallel,
        exchange=UlyssesExchange(SINGLE),
    )


def random_block(parts: LayerParts, seed: int = 0) -> LingBotWorldBlock:
    block = LingBotWorldBlock(parts).requires_grad_(requires_grad=False).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return block
