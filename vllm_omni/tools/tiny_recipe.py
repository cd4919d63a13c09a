"""Names, shapes and random weights of the tiny checkpoint, one component at a time.

A component's tensors are drawn from one CPU generator in the order of their sorted names, one
``randn`` each, then scaled: convolutions and linears by gain / sqrt(fan-in), so that activations
keep their size through the layers, biases and norms by small spreads around their neutral value.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

Config = Mapping[str, Any]
"""A component's ``config.json``, as read."""
Shapes = dict[str, tuple[int, ...]]
Weight = Float32[Tensor, "..."]


def draw(shapes: Shapes, *, seed: int, scale: Callable[[str, Weight], Weight]) -> dict[str, Weight]:
    """Draw every tensor of a component, float32, in the order of the sorted names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale(name, torch.randn(shapes[name], generator=generator)) for name in sorted(shapes)
    }


def _fan_in_scaled(noise: Weight, gain: float = 1.0) -> Weight:
    return noise * (gain / math.sqrt(noise[0].numel()))


# --- transformer ----------------------------------------------------------------------------------


def transformer_shapes(config: Config) -> Shapes:
    """Every tensor of the transformer that ``transformer/config.json`` describes."""
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    patch_volume = math.prod(config["patch_size"])
    # 6 ray channels, each 8x8 pixels of a latent cell folded into channels, times a patch.
    camera_channels = 6 * 64 * patch_volume
    shapes: Shapes = {
        "patch_embedding.weight": (dim, config["in_channels"], *config["patch_size"]),
        "patch_embedding.bias": (dim,),
        "head.modulation": (1, 2, dim),
    }
    linears = {
        "patch_embedding_wancamctrl": (dim, camera_channels),
        "c2ws_hidden_states_layer1": (dim, dim),
        "c2ws_hidden_states_layer2": (dim, dim),
        "text_embedding.0": (dim, config["text_dim"]),
        "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, config["freq_dim"]),
        "time_embedding.2": (dim, dim),
        "time_projection.1": (6 * dim, dim),
        "head.head": (config["out_channels"] * patch_volume, dim),
    }
    for layer in range(config["num_layers"]):
        shapes |= _block_norms(f"blocks.{layer}", dim)
        linears |= _block_linears(f"blocks.{layer}", dim, config["ffn_dim"])
    for name, (rows, columns) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def _block_norms(block: str, dim: int) -> Shapes:
    norms = [f"{attn}.norm_{part}" for attn in ("self_attn", "cross_attn") for part in "qk"]
    shapes: Shapes = {f"{block}.{norm}.weight": (dim,) for norm in norms}
    shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (dim,)
    shapes[f"{block}.modulation"] = (1, 6, dim)
    return shapes


def _block_linears(block: str, dim: int, ffn_dim: int) -> dict[str, tuple[int, int]]:
    square = [f"{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in "qkvo"]
    square += [
        "cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer",
    ]  # fmt: skip
    linears = {f"{block}.{name}": (dim, dim) for name in square}
    linears[f"{block}.ffn.0"] = (ffn_dim, dim)
    linears[f"{block}.ffn.2"] = (dim, ffn_dim)
    return linears


def scale_transformer(name: str, noise: Weight) -> Weight:
    """Turn unit noise into one tensor of the transformer."""
    if name.endswith("modulation"):
        return 0.2 * noise
    if ".norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "time_projection" in name:
        return _fan_in_scaled(noise, 0.5)
    if "cam_scale" in name or "cam_shift" in name:
        return _fan_in_scaled(noise, 0.3)
    return _fan_in_scaled(noise)


# --- VAE ------------------------------------------------------------------------------------------


def vae_shapes(config: Config) -> Shapes:
    """Every tensor of the VAE that ``vae/config.json`` describes."""
    z_dim = config["z_dim"]
    shapes = _encoder_shapes(config) | _decoder_shapes(config)
    shapes |= _conv("quant_conv", 2 * z_dim, 2 * z_dim, (1, 1, 1))
    shapes |= _conv("post_quant_conv", z_dim, z_dim, (1, 1, 1))
    return shapes


def _encoder_shapes(config: Config) -> Shapes:
    widths = [config["base_dim"] * factor for factor in config["dim_mult"]]
    shapes = _conv("encoder.conv_in", config["base_dim"], config["in_channels"], (3, 3, 3))
    index = 0  # the encoder numbers residual blocks and resamplers in one list
    channels = config["base_dim"]
    for level, width in enumerate(widths):
        for _ in range(config["num_res_blocks"]):
            shapes |= _residual(f"encoder.down_blocks.{index}", channels, width)
            channels, index = width, index + 1
        if level < len(widths) - 1:
            block = f"encoder.down_blocks.{index}"
            shapes |= _conv(f"{block}.resample.1", width, width, (3, 3))
            if config["temperal_downsample"][level]:
                shapes |= _conv(f"{block}.time_conv", width, width, (3, 1, 1))
            index += 1
    shapes |= _middle("encoder.mid_block", channels)
    shapes["encoder.norm_out.gamma"] = (channels, 1, 1, 1)
    shapes |= _conv("encoder.conv_out", 2 * config["z_dim"], channels, (3, 3, 3))
    return shapes


def _decoder_shapes(config: Config) -> Shapes:
    widths = [config["base_dim"] * factor for factor in reversed(config["dim_mult"])]
    channels = widths[0]
    shapes = _conv("decoder.conv_in", channels, config["z_dim"], (3, 3, 3))
    shapes |= _middle("decoder.mid_block", channels)
    for level, width in enumerate(widths):
        block = f"decoder.up_blocks.{level}"
        for index in range(config["num_res_blocks"] + 1):
            shapes |= _residual(f"{block}.resnets.{index}", channels, width)
            channels = width
        if level < len(widths) - 1:
            sampler = f"{block}.upsamplers.0"
            shapes |= _conv(f"{sampler}.resample.1", width // 2, width, (3, 3))
            if config["temperal_downsample"][-1 - level]:
                shapes |= _conv(f"{sampler}.time_conv", 2 * width, width, (3, 1, 1))
            channels = width // 2  # an upsampler halves its channels
    shapes["decoder.norm_out.gamma"] = (channels, 1, 1, 1)
    shapes |= _conv("decoder.conv_out", config["out_channels"], channels, (3, 3, 3))
    return shapes


def _conv(name: str, outputs: int, inputs: int, kernel: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


def _residual(name: str, inputs: int, outputs: int) -> Shapes:
    shapes: Shapes = {
        f"{name}.norm1.gamma": (inputs, 1, 1, 1),
        f"{name}.norm2.gamma": (outputs, 1, 1, 1),
    }
    shapes |= _conv(f"{name}.conv1", outputs, inputs, (3, 3, 3))
    shapes |= _conv(f"{name}.conv2", outputs, outputs, (3, 3, 3))
    if inputs != outputs:
        shapes |= _conv(f"{name}.conv_shortcut", outputs, inputs, (1, 1, 1))
    return shapes


def _middle(name: str, channels: int) -> Shapes:
    attention = f"{name}.attentions.0"
    shapes = _residual(f"{name}.resnets.0", channels, channels)
    shapes |= _residual(f"{name}.resnets.1", channels, channels)
    shapes[f"{attention}.norm.gamma"] = (channels, 1, 1)
    shapes |= _conv(f"{attention}.to_qkv", 3 * channels, channels, (1, 1))
    shapes |= _conv(f"{attention}.proj", channels, channels, (1, 1))
    return shapes


def scale_vae(name: str, noise: Weight) -> Weight:
    """Turn unit noise into one tensor of the VAE."""
    if name.endswith("gamma"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    gains = {"decoder.conv_out.weight": 0.5, "quant_conv.weight": 4.0}
    return _fan_in_scaled(noise, gains.get(name, 1.0))


# --- text encoder ---------------------------------------------------------------------------------


def text_encoder_shapes(config: Config) -> Shapes:
    """Every stored tensor of the UMT5 encoder that ``text_encoder/config.json`` describes."""
    dim, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    shapes: Shapes = {
        "shared.weight": (config["vocab_size"], dim),
        "encoder.final_layer_norm.weight": (dim,),
    }
    for layer in range(config["num_layers"]):
        attention = f"encoder.block.{layer}.layer.0"
        feed_forward = f"encoder.block.{layer}.layer.1"
        shapes |= {f"{attention}.SelfAttention.{part}.weight": (inner, dim) for part in "qkv"}
        shapes |= {
            f"{attention}.SelfAttention.o.weight": (dim, inner),
            f"{attention}.SelfAttention.relative_attention_bias.weight": (
                config["relative_attention_num_buckets"],
                config["num_heads"],
            ),
            f"{attention}.layer_norm.weight": (dim,),
            f"{feed_forward}.DenseReluDense.wi_0.weight": (config["d_ff"], dim),
            f"{feed_forward}.DenseReluDense.wi_1.weight": (config["d_ff"], dim),
            f"{feed_forward}.DenseReluDense.wo.weight": (dim, config["d_ff"]),
            f"{feed_forward}.layer_norm.weight": (dim,),
        }
    return shapes


def scale_text_encoder(name: str, noise: Weight) -> Weight:
    """Turn unit noise into one tensor of the text encoder."""
    if "layer_norm" in name:
        return 1 + 0.1 * noise
    if name == "shared.weight":
        return noise
    if name.endswith("SelfAttention.q.weight"):
        return _fan_in_scaled(noise, 0.5)
    return _fan_in_scaled(noise)
