"""The transformer's and the scheduler's configuration, read from the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model

from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, PATCH, SPATIAL_FACTOR
from vllm_omni.diffusion.models.checkpoint_files import (
    DIFFUSERS,
    TRANSFORMERS,
    check_readable,
    check_weights,
    read_json,
)
from vllm_omni.errors import CheckpointError, InvalidRequestError
from vllm_omni.experimental.ar_diffusion.kv_cache.window import WindowLayout
from vllm_omni.inputs.checking import Message, Model, PositiveInt, validate

TRANSFORMER_CLASS = "CausalLingBotWorldTransformer3DModel"
PIPELINE_CLASS = "LingBotWorldCausalDMDPipeline"
CAMERA_CHANNELS = 6 * SPATIAL_FACTOR * SPATIAL_FACTOR
"""Origin and direction of each pixel's ray, folded by the VAE's stride."""
MASK_CHANNELS = 4

_FIXED_TRANSFORMER = {
    "patch_size": [1, PATCH, PATCH],
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
    "num_frames_per_block": LATENT_FRAMES_PER_CHUNK,
}
_FIXED_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "use_flow_sigmas": True,
    "use_dynamic_shifting": False,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
}
_DEFAULT_FLOW_SHIFT = 5.0


@dataclass(frozen=True, slots=True)
class LingBotWorldConfig:
    """Sizes of the transformer; the defaults are those of the released 14B model.

    Attributes:
        sink_size: latent frames that attention never forgets.
        sliding_window_num_frames: latent frames visible at once, sink and chunk included,
            unless ``local_attn_size`` is given (not -1).

    Raises:
        CheckpointError: if the sizes contradict each other.
    """

    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 36
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    eps: float = 1e-6
    sink_size: int = 9
    sliding_window_num_frames: int = 18
    local_attn_size: int = -1

    def __post_init__(self) -> None:
        sizes = {
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "text_dim": self.text_dim,
            "freq_dim": self.freq_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.num_layers,
        }
        for name, value in sizes.items():
            if value < 1:
                raise CheckpointError(f"transformer config: {name} must be positive, got {value}")
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            raise CheckpointError(
                "transformer config: attention_head_dim must be even and at least 6 (one rotary "
                f"pair per axis), got {self.attention_head_dim}"
            )
        if self.freq_dim % 2:
            raise CheckpointError(f"transformer config: freq_dim must be even, got {self.freq_dim}")
        if self.in_channels != 2 * self.out_channels + MASK_CHANNELS:
            raise CheckpointError(
                "transformer config: in_channels must be 2 * out_channels + "
                f"{MASK_CHANNELS} (noise, mask, image), got {self.in_channels} with out_channels "
                f"{self.out_channels}"
            )
        _ = self.window

    @property
    def dim(self) -> int:
        """Number of channels of a token: heads times the size of a head."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def window(self) -> WindowLayout:
        """Layout of a session's KV window: the sink and the ring behind it."""
        frames = (
            self.sliding_window_num_frames if self.local_attn_size == -1 else self.local_attn_size
        )
        return WindowLayout(frames, self.sink_size)

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> "LingBotWorldConfig":
        """Read ``transformer/config.json``; absent keys have the 14B values, others are metadata.

        Raises:
            CheckpointError: naming the field, the expected and the actual value.
        """
        _require(raw, {"_class_name": TRANSFORMER_CLASS, **_FIXED_TRANSFORMER}, "transformer")
        sizes = _checked(_Sizes, raw, "transformer").model_dump()
        return cls(**sizes)


class _TransformerHeads(Message):
    num_attention_heads: PositiveInt


def check_checkpoint(directory: Path, parallel: DiffusionParallelConfig) -> None:
    """Refuse files that cannot be loaded, and degrees that cannot share the attention heads.

    Raises:
        CheckpointError: naming a file of any part that is missing, unreadable or cut short, or if
            the transformer's configuration does not say how many heads there are.
        UnsupportedParallelismError: if they cannot be shared evenly.
    """
    path = directory / "transformer" / "config.json"
    try:
        heads = validate(_TransformerHeads, read_json(path)).num_attention_heads
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {error}") from None
    parallel.check_heads(heads)
    for part in ("transformer", "vae"):
        check_weights(directory / part, DIFFUSERS)
    check_weights(directory / "text_encoder", TRANSFORMERS)
    for file in ("vae/config.json", "scheduler/scheduler_config.json", "text_encoder/config.json"):
        read_json(directory / file)
    check_readable(directory / "tokenizer")


def read_flow_shift(raw: Mapping[str, object]) -> float:
    """Check ``scheduler/scheduler_config.json`` and return its default flow shift.

    Raises:
        CheckpointError: if a field has not the value this model was distilled with.
    """
    missing = [name for name in _FIXED_SCHEDULER if name not in raw]
    if missing:
        raise CheckpointError(f"scheduler config: {', '.join(missing)} missing")
    _require(raw, _FIXED_SCHEDULER, "scheduler")
    shifts = _checked(_Shifts, raw, "scheduler")
    given = [shift for shift in (shifts.flow_shift, shifts.shift) if shift is not None]
    return (*given, _DEFAULT_FLOW_SHIFT)[0]


_SIZES: dict[str, Any] = {
    size.name: (Annotated[size.type, Field(strict=True)], size.default)
    for size in fields(LingBotWorldConfig)
}
_Sizes = create_model("_Sizes", __base__=Message, **_SIZES)
"""The same fields as the file may hold them, each of which may be absent."""


class _Shifts(Message):
    flow_shift: Annotated[float, Field(strict=True, gt=0)] | None = None
    shift: Annotated[float, Field(strict=True, gt=0)] | None = None


def _checked(model: type[Model], raw: Mapping[str, object], what: str) -> Model:
    try:
        return validate(model, raw)
    except InvalidRequestError as error:
        raise CheckpointError(f"{what} config: {error}") from None


def _require(raw: Mapping[str, object], expected: Mapping[str, object], what: str) -> None:
    for name, value in expected.items():
        if name in raw and raw[name] != value:
            raise CheckpointError(f"{what} config: {name} must be {value!r}, got {raw[name]!r}")
