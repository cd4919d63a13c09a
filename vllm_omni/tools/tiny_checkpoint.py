"""Writes a complete checkpoint in the real layout, 5.8 MB, with reproducible random weights.

The files are the same to the last byte on every x86-64 machine, so that tests, the demo and
benchmarks all speak of one model. Random weights paint noise: it is for development only.

A component's tensors are drawn from one CPU generator in the order of their sorted names, one
``randn`` each, then scaled: convolutions and linears by gain / sqrt(fan-in), so that activations
keep their size through the layers, biases and norms by small spreads around their neutral value.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from safetensors.torch import save
from torch import Tensor, nn

from vllm_omni.errors import ConfigError
from vllm_omni.tools.toy_world.vae_twin import VaeShape, VaeTwin
from vllm_omni.tools.toy_world.world_twin import WorldShape, WorldTwin

Config = Mapping[str, Any]
"""A component's ``config.json``, as read."""
Shapes = dict[str, tuple[int, ...]]
Weight = Float32[Tensor, "..."]
TEMPLATE_DIR = Path(__file__).resolve().parents[1] / "data" / "tiny_checkpoint"


def draw(shapes: Shapes, *, seed: int, scale: Callable[[str, Weight], Weight]) -> dict[str, Weight]:
    """Draw every tensor of a component, float32, in the order of the sorted names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale(name, torch.randn(shapes[name], generator=generator)) for name in sorted(shapes)
    }


def _fan_in_scaled(noise: Weight, gain: float = 1.0) -> Weight:
    return noise * (gain / math.sqrt(noise[0].numel()))


def _shapes_of(build: Callable[[Any], nn.Module], shape: type, config: Config) -> Shapes:
    """Names and shapes of a trainable twin's tensors; none of them gets memory."""
    values = {field.name: config[field.name] for field in fields(shape)}
    lists_as_tuples = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    with torch.device("meta"):
        twin = build(shape(**lists_as_tuples))
    return {name: tuple(tensor.shape) for name, tensor in twin.state_dict().items()}


def transformer_shapes(config: Config) -> Shapes:
    """Every tensor of the transformer that ``transformer/config.json`` describes."""
    return _shapes_of(WorldTwin, WorldShape, config)


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


def vae_shapes(config: Config) -> Shapes:
    """Every tensor of the VAE that ``vae/config.json`` describes."""
    return _shapes_of(VaeTwin, VaeShape, config)


def scale_vae(name: str, noise: Weight) -> Weight:
    """Turn unit noise into one tensor of the VAE."""
    if name.endswith("gamma"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    gains = {"decoder.conv_out.weight": 0.5, "quant_conv.weight": 4.0}
    return _fan_in_scaled(noise, gains.get(name, 1.0))


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


@dataclass(frozen=True, slots=True)
class _Component:
    """One set of weights: where they go and how they are drawn."""

    directory: str
    filename: str
    seed: int
    shapes: Callable[[Config], Shapes]
    scale: Callable[[str, Weight], Weight]


_DIFFUSERS = "diffusion_pytorch_model.safetensors"
_COMPONENTS = (
    _Component("transformer", _DIFFUSERS, 1234, transformer_shapes, scale_transformer),
    _Component("vae", _DIFFUSERS, 4321, vae_shapes, scale_vae),
    _Component("text_encoder", "model.safetensors", 2468, text_encoder_shapes, scale_text_encoder),
)


def write_tiny_checkpoint(directory: Path, *, force: bool = False) -> Path:
    """Write the checkpoint; the directory appears complete or not at all.

    Args:
        directory: created, with its parents; may exist if it is empty.
        force: replace an earlier tiny checkpoint that stands there.

    Returns:
        ``directory``.

    Raises:
        ConfigError: if something else is in the way, or its parent cannot be made.
    """
    _check_target(directory, force=force)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {directory.parent}: {error.strerror}; name another directory"
        ) from error
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _write_files(fresh)
        if directory.exists():
            directory.rename(Path(scratch) / "old")  # deleted with the scratch directory
        fresh.rename(directory)
    return directory


def is_tiny_checkpoint(directory: Path) -> bool:
    """Whether a directory holds this checkpoint and nothing else, with these very bytes."""
    present = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    if present != list(checkpoint_files()):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        _write_files(Path(scratch))
        return all(
            (directory / name).read_bytes() == (Path(scratch) / name).read_bytes()
            for name in present
        )


def checkpoint_files() -> tuple[str, ...]:
    """Relative paths of all files that :func:`write_tiny_checkpoint` writes, sorted."""
    weights = [f"{component.directory}/{component.filename}" for component in _COMPONENTS]
    return tuple(sorted([*_template_files(), *weights]))


def _template_files() -> list[str]:
    return [path.relative_to(TEMPLATE_DIR).as_posix() for path in TEMPLATE_DIR.rglob("*.json")]


def _check_target(directory: Path, *, force: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name another one")
    present = [path for path in directory.rglob("*") if not path.is_dir()]
    if present and not force:
        raise ConfigError(f"{directory} is not empty; name another directory or pass --force")
    known = set(checkpoint_files())
    foreign = [path for path in present if path.relative_to(directory).as_posix() not in known]
    if foreign:
        raise ConfigError(
            f"{directory} holds {foreign[0].name}, which no tiny checkpoint has; --force replaces "
            "only an earlier tiny checkpoint, so name another directory"
        )


def _write_files(directory: Path) -> None:
    for name in _template_files():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TEMPLATE_DIR / name, target)
    for component in _COMPONENTS:
        config = json.loads((directory / component.directory / "config.json").read_text())
        weights = draw(component.shapes(config), seed=component.seed, scale=component.scale)
        path = directory / component.directory / component.filename
        write_weights(path, weights)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, with the permissions of the umask.

    The library's own ``save_file`` makes a file that is closed to everybody else.
    """
    path.write_bytes(save(dict(weights), metadata={"format": "pt"}))
