"""Finds a quantisation of vLLM by the name that the installed version knows it under."""

import json
from pathlib import Path

from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from vllm_omni.errors import ConfigError

_FP8 = "fp8"
_FP8_PER_TENSOR = "fp8_per_tensor"


def quantization_config(method: object, checkpoint: Path) -> QuantizationConfig | None:
    """vLLM's configuration object of a quantisation; ``None`` for none.

    ``fp8`` and ``fp8_per_tensor`` quantise a plain checkpoint while it is loaded. Newer releases
    of vLLM keep ``fp8`` for checkpoints that hold 8-bit weights, so there both names mean
    ``fp8_per_tensor``. Any other name is looked up among vLLM's methods and those that a plug-in
    has registered; if the method has a description file, it must be in the checkpoint.

    Args:
        checkpoint: directory of the component.

    Raises:
        ConfigError: if this vLLM has no such method, or its description is missing.
    """
    if method is None:
        return None
    if method in {_FP8, _FP8_PER_TENSOR}:
        return _online_fp8()
    try:
        found = get_quantization_config(str(method))
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"quantization_config.method {method!r}: the installed vLLM does not know it ({error})"
        ) from error
    return found.from_config(_description(str(method), found.get_config_filenames(), checkpoint))


def _online_fp8() -> QuantizationConfig:
    try:
        return Fp8Config(is_checkpoint_fp8_serialized=False, activation_scheme="dynamic")
    except ValueError:
        # This release names it fp8_per_tensor, and has the two imports below.
        from vllm.config.quantization import resolve_quantization_config
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        return OnlineQuantizationConfig(args=resolve_quantization_config(_FP8_PER_TENSOR, None))


def _description(method: str, names: list[str], checkpoint: Path) -> dict[str, object]:
    if not names:
        return {}
    for name in names:
        file = checkpoint / name
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    raise ConfigError(
        f"quantization_config.method {method!r} needs its description in {checkpoint.name}/: "
        f"{' or '.join(names)}"
    )
